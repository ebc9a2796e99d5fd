"""The package's own kernels follow the contract's orders; a kernel that does not is told where it parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from hardware.cuda import mma
from hardware.rocm import mfma
from rlkernel.contract.build import Contract, build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import Split
from rlkernel.errors import ContractError, NumericsError
from rlkernel.kernels.cpu.attention import attention
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig
from rlkernel.verify.discovery.dependency import probe_dependency
from rlkernel.verify.discovery.expected import differences, domain_size, expected_order
from rlkernel.verify.discovery.kernels import kernel_target
from rlkernel.verify.discovery.notation import compact
from rlkernel.verify.discovery.reveal import Revelation, reveal
from rlkernel.verify.discovery.targets import Target, function_target
from tests.verify import sums
from tests.verify.sums import Array

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=600,
    hidden_size=320,
    intermediate_size=384,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    qk_norm=True,
    tied_embeddings=True,
)


@pytest.fixture(scope="module")
def contract() -> Contract:
    return build_contract(CONFIG, topology=Topology(tp=2))


def against(found: Revelation, contract: Contract, case: str, region: str) -> list[str]:
    assert found.proven, found.reason
    (order,) = found.orders
    return differences(contract.entries[(case, region)], found.n, order.tree, order.arithmetic, order.subnormals)


@pytest.mark.parametrize(
    ("name", "n", "parts", "case", "region"),
    [
        ("rlkernel.gemm", 320, 1, "rollout_decode", "qkv_proj"),
        ("rlkernel.gemm", 384, 2, "trainer_forward", "down_proj"),
        ("rlkernel.weight_gradient", 100, 1, "trainer_backward", "gate_up_proj.wgrad"),
        ("rlkernel.rms_norm", 320, 1, "trainer_score", "rms_norm"),
        ("rlkernel.rms_norm", 16, 1, "trainer_score", "qk_norm"),
        ("rlkernel.rms_norm_backward", 320, 1, "trainer_backward", "final_norm"),
        ("rlkernel.logprob", 600, 2, "trainer_forward", "logprob"),
        ("rlkernel.sum_of_squares", 1300, 1, "optimizer_step", "gradient_norm"),
        ("rlkernel.attention", 600, 1, "rollout_prefill", "attention"),
    ],
)
def test_kernels_follow_their_entries(
    contract: Contract, name: str, n: int, parts: int, case: str, region: str
) -> None:
    found = reveal(kernel_target(name, n=n, parts=parts))
    assert against(found, contract, case, region) == []
    (order,) = found.orders
    assert order.checked >= 1000 and order.differing == 0


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_backward", "logprob", "sum_of_squares", "attention", "gemm"])
def test_few_inputs(name: str, n: int) -> None:
    if name == "rms_norm_backward" and n == 2:
        with pytest.raises(ContractError, match="3 and more"):
            kernel_target(f"rlkernel.{name}", n=n)
        return
    found = reveal(kernel_target(f"rlkernel.{name}", n=n, rows=4), vectors=100)
    assert found.proven and found.orders[0].tree.leaves == n


def test_bfloat16_gemm(contract: Contract) -> None:
    found = reveal(kernel_target("rlkernel.gemm", n=320, dtype="bfloat16"))
    assert against(found, contract, "trainer_forward", "qkv_proj") == []


def test_another_leaf_plan_is_told(contract: Contract) -> None:
    found = reveal(kernel_target("rlkernel.gemm", n=384), vectors=100)
    (difference,) = against(found, contract, "trainer_forward", "down_proj")
    assert difference.startswith("merge order: the entry adds 192 + 193 (2 inputs)")
    assert "adds (0..191) + 192" in difference


def test_another_order_of_lanes_is_told(contract: Contract) -> None:
    def lanes_ascending(x: Array) -> Array:
        return sums.sequential(np.stack([sums.sequential(x[:, lane::256]) for lane in range(256)], axis=1))

    found = reveal(function_target(lanes_ascending, "ascending", n=320, rows=64), vectors=100)
    difference = against(found, contract, "trainer_score", "rms_norm")[0]
    assert "the entry adds 2 + (3, 67)" not in difference
    assert difference.startswith("merge order: the entry adds") and "input" in difference


def test_rounded_products_are_told(contract: Contract) -> None:
    def product(a: Array, b: Array) -> Array:
        total = np.zeros((a.shape[0], b.shape[1]), dtype=np.float32)
        for k in range(a.shape[1]):
            total = total + a[:, k, None] * b[k]
        return total

    found = reveal(function_target(product, "product", n=320, rows=16, columns=4, operands=2), vectors=100)
    assert against(found, contract, "trainer_forward", "qkv_proj") == [
        "rounding: the product of input 1 is rounded, the entry has it fused (fma) (319 inputs in all)"
    ]


def test_precision_zero_and_subnormals_are_told(contract: Contract) -> None:
    def double(x: Array) -> Array:
        total = x[:, 0].astype(np.float64)
        for k in range(1, x.shape[1]):
            total = total + x[:, k]
        return total.astype(np.float32)

    found = reveal(function_target(double, "double", n=100, rows=64), vectors=100)
    (order,) = found.orders
    told = differences(
        contract.entries[("trainer_backward", "qkv_proj.wgrad")], 100, order.tree, order.arithmetic, "not kept"
    )
    assert told == [
        "precision: sums are kept in float64, the entry says float32",
        "merge order: the sum does not start from +0 (a sum of -0 is -0)",
        "rounding: subnormal numbers are not kept",
    ]


def product_target(function: object, n: int) -> Target:
    return function_target(
        lambda a, b: function(a, b.T.contiguous()),  # type: ignore[operator]
        "unit",
        n=n,
        rows=8,
        columns=4,
        operands=2,
        dtype="bfloat16",
        output="float32",
        library="torch",
    )


def test_steps_of_matrix_units() -> None:
    hopper = build_contract(CONFIG, profile="hopper", dtype="bfloat16")
    cdna3 = build_contract(CONFIG, profile="cdna3", dtype="bfloat16")
    key = ("trainer_backward", "qkv_proj.wgrad")
    sm_90 = reveal(product_target(mma.chain_bf16, 48), vectors=64)
    gfx942 = reveal(product_target(mfma.chain_bf16, 48), vectors=64)
    assert against(sm_90, hopper, *key) == []
    assert against(gfx942, cdna3, *key) == []
    (told,) = against(gfx942, hopper, *key)
    assert told.endswith("the entry adds more terms at once where the callable adds 0 + 1 + 2 + ... 8 terms first")
    (told,) = against(sm_90, cdna3, *key)
    assert told.endswith("0 + 1 + 2 + ... 8 terms (8 inputs) first; the callable adds more terms at once")


def test_what_an_entry_cannot_say_is_refused(contract: Contract) -> None:
    down = contract.entries[("trainer_forward", "down_proj")]
    with pytest.raises(ContractError, match="383 inputs cannot be cut into 2 equal leaves"):
        expected_order(down, 383)
    with pytest.raises(ContractError, match="reduces nothing"):
        expected_order(contract.entries[("trainer_forward", "swiglu")], 8)
    hopper = build_contract(CONFIG, profile="hopper", dtype="bfloat16")
    with pytest.raises(ContractError, match="two sums over keys"):
        expected_order(hopper.entries[("trainer_forward", "attention")], 8)
    undecided = replace(contract.entries[("trainer_forward", "qkv_proj")], split=Split(leaves=2))
    with pytest.raises(ContractError, match="2 parts without a merge order"):
        expected_order(undecided, 8)
    assert domain_size(down, CONFIG) == 384
    assert domain_size(contract.entries[("trainer_forward", "attention")], CONFIG) is None


def test_expected_orders(contract: Contract) -> None:
    entry = contract.entries[("trainer_forward", "down_proj")]
    assert compact(expected_order(entry, 384).tree) == "chain(chain(0..191) x2 by 192)"
    logprob = contract.entries[("trainer_forward", "logprob")]
    assert compact(expected_order(logprob, 600).tree) == "chain(tree(0..127) x3 by 128, tree(384..599))"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rlkernel.gem", {}, "there is no kernel"),
        ("rlkernel.rms_norm", {"dtype": "bfloat16"}, "float32 inputs"),
        ("rlkernel.rms_norm", {"columns": 3}, "ROWSxN"),
        ("rlkernel.attention", {"parts": 2}, "has no parts"),
    ],
)
def test_kernel_options_that_do_not_exist(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        kernel_target(name, n=8, **options)  # type: ignore[arg-type]


def test_attention_depends_on_no_later_key() -> None:
    """Queries 0..11 of one sequence over its 12 keys; the page's other slots hold NaN."""
    rng = np.random.default_rng(0)
    n, depth = 12, 16
    keys = np.full((1, 1, depth, 64), np.nan, dtype=np.float32)
    values = np.full((1, 1, 64, depth), np.nan, dtype=np.float32)
    query = rng.standard_normal((n, 1, depth)).astype(np.float32)
    workers = Workers(1)
    starts, positions = np.array([0, n], dtype=np.int32), np.arange(n, dtype=np.int32)
    table = np.zeros((1, 1), dtype=np.int32)

    def run(k: Array, v: Array) -> Array:
        keys[0, 0, :, :n], values[0, 0, :n] = k.T, v
        return attention(query, keys, values, table, starts, positions, np.float32(0.3), workers, False)[0]

    k, v = (rng.standard_normal((n, depth)).astype(np.float32) for _ in range(2))
    for which in (0, 1):
        reach = probe_dependency(run, [k, v], which, input_axis=0, output_axis=0)
        assert reach.describe() == "output k depends on inputs 0..k"

    def peeking(k: Array, v: Array) -> Array:
        return run(k, v) + np.float32(0) * v[-1]  # multiplying by zero does not hide a NaN

    reach = probe_dependency(peeking, [k, v], 1, input_axis=0, output_axis=0)
    assert reach.describe() != "output k depends on inputs 0..k"
    assert reach.outputs_of(n - 1) == list(range(n))


def test_dependency_patterns() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal((8, 3)).astype(np.float32)
    rows = probe_dependency(np.matmul, [a, b], 0, input_axis=0, output_axis=0)
    assert rows.describe() == "output k depends on input k alone"
    assert probe_dependency(np.matmul, [a, b], 0, input_axis=1, output_axis=1).matrix.all()
    largest = probe_dependency(lambda x: np.array([np.fmax.reduce(x)]), [np.array([1.0, 5.0, 2.0])], 0)
    assert largest.inputs_of(0) == [0, 1, 2]
    part = probe_dependency(lambda x: x[:2] * 2, [np.arange(4.0)], 0)
    assert part.describe() == "output k depends on input k alone; inputs 2, 3 reach no output"
    with pytest.raises(NumericsError, match="not deterministic"):
        probe_dependency(lambda x: rng.standard_normal(3), [np.arange(4.0)], 0)
    with pytest.raises(ContractError, match="floating-point"):
        probe_dependency(lambda x: x, [np.arange(4)], 0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and wait for each other where the machine is busy."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("one_thread")
def test_a_linear_layer_takes_its_weight_transposed() -> None:
    found = reveal(
        function_target(
            torch.nn.functional.linear, "linear", n=33, rows=4, columns=6, operands=2, library="torch", transposed=True
        ),
        vectors=64,
    )
    assert found.proven
