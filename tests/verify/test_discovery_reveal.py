"""Revealed orders: of sums written here, of torch and NumPy, in every precision; and what must be refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hardware.cuda import mma
from hardware.rocm import mfma
from rlkernel.errors import ContractError
from rlkernel.verify.discovery.notation import compact, summary
from rlkernel.verify.discovery.probe import NotASummation
from rlkernel.verify.discovery.reading import parse
from rlkernel.verify.discovery.reveal import Revelation, reveal
from rlkernel.verify.discovery.targets import Target, function_target
from rlkernel.verify.discovery.tree import Tree
from tests.verify import sums
from tests.verify.sums import Array, build


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and wait for each other where the machine is busy."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def rows_target(function: Callable[[Array], Array], n: int, rows: int = 64) -> Target:
    return function_target(function, function.__name__, n=n, rows=rows)


def reveal_one(target: Target) -> tuple[Tree, Revelation]:
    """The only order of a target, which must be proven."""
    found = reveal(target)
    assert found.proven, found.reason
    assert len(found.orders) == 1
    assert found.vectors >= 1000
    assert found.orders[0].checked >= 1000 and found.orders[0].differing == 0
    return found.orders[0].tree, found


def blocks(n: int, size: int) -> list[range]:
    return [range(start, min(n, start + size)) for start in range(0, n, size)]


@pytest.mark.parametrize("n", [1, 2, 3, 100, 1000, 1024])
def test_sequential(n: int) -> None:
    tree, found = reveal_one(rows_target(sums.sequential, n))
    assert tree == build(n, lambda b: b.chain(range(n)))
    assert found.orders[0].arithmetic.starts_at_zero
    assert found.probes < 12 * n + 50  # not n * n


def halves(n: int) -> Tree:
    def join(b: object, first: int, end: int) -> int:
        if end - first == 1:
            return first
        middle = first + (end - first) // 2
        return b.join(join(b, first, middle), join(b, middle, end))  # type: ignore[attr-defined, no-any-return]

    return build(n, lambda b: join(b, 0, n))


@pytest.mark.parametrize("n", [7, 96, 1000, 1024])
def test_pairwise(n: int) -> None:
    tree, found = reveal_one(rows_target(sums.pairwise, n))
    assert tree == halves(n)
    assert found.orders[0].arithmetic.starts_at_zero is False


def test_swapped_halves_are_another_tree() -> None:
    straight, _ = reveal_one(rows_target(sums.pairwise, 31))
    swapped, _ = reveal_one(rows_target(sums.swapped_pairwise, 31))
    assert swapped != straight
    # of 32 inputs both halves have the same form: exchanging them only exchanges children
    even, _ = reveal_one(rows_target(sums.swapped_pairwise, 32))
    assert even == halves(32)


@pytest.mark.parametrize("n", [5, 250, 1024])
def test_strided(n: int) -> None:
    tree, _ = reveal_one(rows_target(sums.strided, n))
    assert tree == build(n, lambda b: b.chain([b.chain(range(lane, n, 8)) for lane in range(min(8, n))]))


@pytest.mark.parametrize("n", [20, 333, 1024])
def test_blocked(n: int) -> None:
    tree, _ = reveal_one(rows_target(sums.blocked, n))
    assert tree == build(n, lambda b: b.chain([b.chain(block) for block in blocks(n, 32)]))


@pytest.mark.parametrize("n", [11, 777, 1024])
def test_tree_of_chains(n: int) -> None:
    tree, _ = reveal_one(rows_target(sums.tree_of_chains, n))
    assert tree == build(n, lambda b: b.balanced([b.chain(range(lane, n, 16)) for lane in range(min(16, n))]))


def test_backwards() -> None:
    tree, found = reveal_one(rows_target(lambda x: sums.sequential(x[:, ::-1]), 1000))
    assert compact(tree) == "chain(999..0 by -1)"
    assert found.probes < 12 * 1000


def test_the_seed_changes_the_probes_and_not_the_tree() -> None:
    target = rows_target(sums.tree_of_chains, 100)
    assert len({compact(reveal(target, seed=seed, vectors=64).orders[0].tree) for seed in range(8)}) == 1


@pytest.mark.parametrize("n", [1, 2, 9, 513, 1000, 1024])
def test_torch_sum(n: int) -> None:
    tree, found = reveal_one(function_target(torch.sum, "torch.sum", n=n, library="torch"))
    assert tree.leaves == n and found.calls < 20 * n + 60


def test_torch_sum_over_rows() -> None:
    single, _ = reveal_one(function_target(torch.sum, "torch.sum", n=257, library="torch"))
    rows, _ = reveal_one(function_target(torch.sum, "torch.sum", n=257, rows=9, library="torch", arguments={"dim": -1}))
    assert rows == single


@pytest.mark.parametrize(("m", "k", "n"), [(1, 512, 1), (16, 1024, 16), (7, 300, 5), (3, 97, 33)])
def test_torch_matmul(m: int, k: int, n: int) -> None:
    """MKL may use several orders in one product: each is found, and every output is one of them."""
    found = reveal(function_target(torch.matmul, "torch.matmul", n=k, rows=m, columns=n, operands=2, library="torch"))
    assert found.proven, found.reason
    assert sum(order.outputs for order in found.orders) == m * n
    assert all(order.differing == 0 and order.checked for order in found.orders)


@pytest.mark.parametrize("n", [8, 500, 1000])
def test_numpy_sum(n: int) -> None:
    reveal_one(function_target(np.sum, "numpy.sum", n=n))


def test_numpy_dot() -> None:
    """OpenBLAS finishes a dot product in float64: nodes have precisions of their own."""
    _, found = reveal_one(function_target(np.dot, "numpy.dot", n=333, operands=2))
    assert found.orders[0].arithmetic.accumulator == "float32"


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_precisions(dtype: str) -> None:
    """bfloat16 counts no further than 256, float16 has no room for large masks."""
    tree, found = reveal_one(function_target(torch.sum, "torch.sum", n=300, dtype=dtype, library="torch"))
    arithmetic = found.orders[0].arithmetic
    assert tree.leaves == 300
    assert arithmetic.accumulator == ("float64" if dtype == "float64" else "float32")


def bfloat16_sequential(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape[0], dtype=torch.bfloat16)
    for k in range(x.shape[1]):
        total = total + x[:, k].to(torch.bfloat16)
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_accumulator(dtype: str) -> None:
    target = function_target(bfloat16_sequential, "bf16", n=300, rows=64, dtype=dtype, library="torch")
    tree, found = reveal_one(target)
    assert compact(tree) == "chain(0..299)"
    assert found.orders[0].arithmetic.accumulator == "bfloat16"


def test_a_wider_accumulator() -> None:
    def wide(x: Array) -> Array:
        return sums.sequential(x.astype(np.float64)).astype(np.float32)

    def sequential_double(x: Array) -> Array:
        total = np.zeros(x.shape[0])
        for k in range(x.shape[1]):
            total = total + x[:, k].astype(np.float64)
        return total.astype(np.float32)

    tree, found = reveal_one(rows_target(sequential_double, 300))
    assert compact(tree) == "chain(0..299)"
    assert found.orders[0].arithmetic.accumulator == "float64"
    assert wide(np.ones((1, 3), dtype=np.float32))[0] == 3


def test_narrowed_operands() -> None:
    """As tf32 or a hidden cast would."""

    def narrowed(x: Array) -> Array:
        bits = x.view(np.uint32) & np.uint32(0xFFFFE000)
        return sums.sequential(bits.view(np.float32))

    _, found = reveal_one(rows_target(narrowed, 40))
    assert found.orders[0].arithmetic.operand_bits == 11
    assert found.orders[0].arithmetic.operand_mode == "truncate"


def dot_chain(a: Array, b: Array, *, fused: bool) -> Array:
    total = np.zeros((a.shape[0], b.shape[1]), dtype=np.float32)
    for k in range(a.shape[1]):
        if fused:
            total = (a[:, k, None].astype(np.float64) * b[k] + total).astype(np.float32)
        else:
            total = total + a[:, k, None] * b[k]
    return total


@pytest.mark.parametrize("fused", [True, False])
def test_fused_and_rounded_products(fused: bool) -> None:
    def product(a: Array, b: Array) -> Array:
        return dot_chain(a, b, fused=fused)

    target = function_target(product, "product", n=60, rows=16, columns=4, operands=2)
    tree, found = reveal_one(target)
    assert compact(tree) == "chain(0..59)"
    # the first product is added to +0, which rounds it in either case
    assert found.orders[0].arithmetic.fused == (frozenset(range(1, 60)) if fused else frozenset())


@pytest.mark.parametrize("start", [0.1, -3.0, 1e6])
def test_an_initial_value_is_a_leaf(start: float) -> None:
    def from_start(x: Array) -> Array:
        return sums.sequential(np.concatenate([np.full_like(x[:, :1], start), x], axis=1))

    def into_the_middle(x: Array) -> Array:
        first = sums.sequential(x[:, :5]) + np.float32(start)
        return first + sums.sequential(x[:, 5:])

    tree, found = reveal_one(rows_target(from_start, 50))
    assert tree == build(51, lambda b: b.chain([50, *range(50)]))
    assert found.orders[0].arithmetic.initial == np.float32(start)
    tree, _ = reveal_one(rows_target(into_the_middle, 12))
    assert tree == build(13, lambda b: b.join(b.join(b.chain(range(5)), 12), b.chain(range(5, 12))))


def test_orders_that_depend_on_the_row() -> None:
    def mixed(x: Array) -> Array:
        result = sums.sequential(x)
        result[5:] = sums.pairwise(x[5:])
        return result

    found = reveal(function_target(mixed, "mixed", n=24, rows=9))
    assert found.proven
    assert [(order.where, order.outputs) for order in found.orders] == [("rows 0..4", 5), ("rows 5..8", 4)]
    assert compact(found.orders[0].tree) == "chain(0..23)"
    assert found.orders[1].tree == halves(24)


@pytest.mark.parametrize("n", [16, 40, 64])
def test_the_matrix_unit_of_sm_90(n: int) -> None:
    """Terms below 2^-25 of the largest are dropped: masks must still work, and the truncation is found."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return mma.chain_bf16(a, b.T.contiguous())

    target = function_target(
        product, "mma", n=n, rows=8, columns=4, operands=2, dtype="bfloat16", output="float32", library="torch"
    )
    tree, found = reveal_one(target)

    def steps(b: object) -> int:
        total = b.join(*range(16))  # type: ignore[attr-defined]
        for block in blocks(n, 16)[1:]:
            total = b.join(total, *block)  # type: ignore[attr-defined]
        return int(total)

    assert tree == build(n, steps)
    adder = found.orders[0].arithmetic.adder
    assert adder is not None and (adder.fraction_bits, adder.mode, adder.unit) == (25, "truncate", "")


def test_the_matrix_unit_of_sm_90_for_float16() -> None:
    """Small float16 numbers are coarse: the probes of the adder must stay on their grid."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(a.shape[0], b.shape[1])
        for k in range(0, a.shape[1], 16):
            total = mma.dot_k16_fp16(a[:, None, k : k + 16], b.T[None, :, k : k + 16].contiguous(), total)
        return total

    for output in ("float32", "float16"):
        target = function_target(
            lambda a, b, kind=output: product(a, b).to(getattr(torch, kind)),
            "mma", n=48, rows=8, columns=4, operands=2, dtype="float16", output=output, library="torch",
        )  # fmt: skip
        tree, found = reveal_one(target)
        assert compact(tree) == "chain({0..15} x3 by 16)"
        adder = found.orders[0].arithmetic.adder
        assert adder is not None and (adder.fraction_bits, adder.mode) == (25, "truncate")


def test_the_matrix_unit_of_gfx942() -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return mfma.chain_bf16(a, b.T.contiguous())

    target = function_target(
        product, "mfma", n=48, rows=8, columns=4, operands=2, dtype="bfloat16", output="float32", library="torch"
    )
    tree, found = reveal_one(target)
    assert compact(tree) == "chain({0..7} x6 by 8)"
    adder = found.orders[0].arithmetic.adder
    assert adder is not None and adder.unit == "mfma.bf16.gfx942"


def test_an_unknown_fused_adder_is_not_claimed() -> None:
    def exact_pairs(x: Array) -> Array:
        """Three terms at once, summed in float64, rounded up."""
        total = np.zeros(x.shape[0])
        for start in range(0, x.shape[1], 3):
            wide = total + x[:, start : start + 3].astype(np.float64).sum(axis=1)
            total = np.nextafter(wide.astype(np.float32), np.float32(np.inf)).astype(np.float64)
        return total.astype(np.float32)

    with pytest.raises(NotASummation):
        found = reveal(rows_target(exact_pairs, 12))
        if not found.proven:
            raise NotASummation(found.reason)


@pytest.mark.parametrize("n", [3, 50, 400])
def test_compensated_sums_are_refused(n: int) -> None:
    found = reveal(rows_target(sums.kahan, n))
    assert not found.proven
    assert "not reproduced by a summation tree" in found.reason
    assert found.orders[0].differing > 0


def test_exact_sums_are_refused() -> None:
    with pytest.raises(NotASummation, match="not a sum that a tree describes"):
        reveal(function_target(math.fsum, "fsum", n=20, output="float64"))


def test_orders_that_depend_on_the_data_are_refused() -> None:
    found = reveal(rows_target(sums.by_size, 20))
    assert not found.proven
    assert "depends on the data" in found.reason
    found = reveal(rows_target(sums.by_majority, 20))
    assert not found.proven
    assert "depends on the signs of its inputs" in found.reason


def test_what_has_no_fixed_order_is_refused() -> None:
    rng = np.random.default_rng(0)

    def shuffled(x: Array) -> Array:
        return sums.sequential(x[:, rng.permutation(x.shape[1])])

    with pytest.raises(NotASummation, match="not deterministic"):
        reveal(rows_target(shuffled, 64))

    calls = 0

    def now_and_then(x: Array) -> Array:
        """Another order in every ninth call, as when a thread comes late."""
        nonlocal calls
        calls += 1
        return sums.pairwise(x) if calls % 9 == 0 else sums.sequential(x)

    with pytest.raises(NotASummation):
        found = reveal(rows_target(now_and_then, 16))
        assert not found.proven and "not deterministic" in found.reason
        raise NotASummation(found.reason)


@pytest.mark.parametrize("period", [5, 97, 613])
def test_what_differs_now_and_then_is_not_blamed_on_its_inputs(period: int) -> None:
    """One row a call, so that hundreds of calls are made, and few of them differ."""
    calls = 0

    def now_and_then(x: Array) -> Array:
        nonlocal calls
        calls += 1
        return sums.sequential(x[:, ::-1]) if calls % period == 0 else sums.sequential(x)

    for seed in range(3):
        try:
            found = reveal(rows_target(now_and_then, 24, rows=1), seed=seed)
            assert not found.proven
            reason = found.reason
        except NotASummation as error:
            reason = str(error)
        assert "is not deterministic" in reason and "no fixed order" in reason, reason


def test_what_comes_again_is_not_called_undetermined() -> None:
    """The negative of the test above: orders that depend on the data, and compensated sums, give their bits again."""
    for function in (sums.by_size, sums.by_majority, sums.kahan):
        found = reveal(rows_target(function, 24, rows=1))
        assert found.orders[0].differing > 0 and found.orders[0].unstable == 0
        assert "not deterministic" not in found.reason


NOTHING_ALONE = r"no plain sum: 1 at input 0 and 0 elsewhere gives 0.0 \(24 of 24 inputs\), though the output depends"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (np.prod, NOTHING_ALONE),
        (np.min, NOTHING_ALONE),
        (np.max, r"no plain sum: with .* at input \d+, .* and 1 elsewhere it gives 1.26\d*e\+30; a sum gives 0 to 22"),
        (lambda x: np.float32(3), "the output depends on none of its 24 inputs$"),
    ],
)
def test_other_reductions_than_sums_are_called_no_plain_sum(function: Callable[[Array], Array], words: str) -> None:
    with pytest.raises(NotASummation, match=words) as refused:
        reveal(function_target(function, "reduction", n=24))
    assert "partial sum of -" not in str(refused.value) and "do not reach" not in str(refused.value)


def test_what_is_no_plain_sum_is_refused() -> None:
    with pytest.raises(NotASummation, match="no plain sum"):
        reveal(function_target(torch.mean, "torch.mean", n=10, library="torch"))
    with pytest.raises(NotASummation, match=r"inputs 3, 5 do not reach"):
        reveal(rows_target(lambda x: sums.sequential(np.delete(x, [3, 5], axis=1)), 8))
    with pytest.raises(NotASummation, match="one finite constant"):
        reveal(rows_target(lambda x: np.full(x.shape[0], np.inf, dtype=np.float32), 8))
    with pytest.raises(ContractError, match="ValueError: broken"):
        reveal(rows_target(broken, 8))
    with pytest.raises(ContractError, match="64 x 1 outputs were expected"):
        reveal(rows_target(lambda x: x[:, :2], 8))
    with pytest.raises(ContractError, match="at most 16,384"):
        reveal(rows_target(sums.sequential, 20_000))


def broken(x: Array) -> Array:
    raise ValueError("broken")


def test_flushed_subnormals_are_reported() -> None:
    def flushing(x: Array) -> Array:
        total = np.zeros(x.shape[0], dtype=np.float32)
        for k in range(x.shape[1]):
            total = total + x[:, k]
            total[np.abs(total) < 2.0**-126] = 0
        return total

    _, found = reveal_one(rows_target(flushing, 30))
    assert found.orders[0].subnormals == "not kept (results are flushed to +0)"
    _, found = reveal_one(rows_target(sums.sequential, 30))
    assert found.orders[0].subnormals == "kept"


def test_a_wrong_tree_is_caught_by_the_proof() -> None:
    """The negative of every test above: two leaves exchanged, and the executed bits differ."""
    tree, _ = reveal_one(rows_target(sums.tree_of_chains, 64))
    names = list(range(64))
    names[0], names[17] = 17, 0
    wrong = tree.relabelled(names)
    x = np.random.default_rng(1).standard_normal((1000, 64)).astype(np.float32)
    bits = sums.tree_of_chains(x).view(np.uint32)
    assert np.array_equal(sums.executed(tree, x).view(np.uint32), bits)
    assert not np.array_equal(sums.executed(wrong, x).view(np.uint32), bits)
    assert summary(wrong) == summary(tree) and wrong != tree
    assert parse(compact(wrong)) == wrong
