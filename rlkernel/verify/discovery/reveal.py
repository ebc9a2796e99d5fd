"""Reveals the order of a reduction, and proves it: the tree, executed, must give the bits on random inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlkernel.errors import ContractError
from rlkernel.verify.discovery.arithmetic import Arithmetic, unit_of
from rlkernel.verify.discovery.details import find_arithmetic
from rlkernel.verify.discovery.formats import Float64, bits_of
from rlkernel.verify.discovery.inputs import draw
from rlkernel.verify.discovery.magnitudes import check_magnitudes
from rlkernel.verify.discovery.probe import Masks, NotASummation, Prober, Slots, Triples
from rlkernel.verify.discovery.proof import Order, check
from rlkernel.verify.discovery.search import reveal_tree
from rlkernel.verify.discovery.sorting import sorted_sum
from rlkernel.verify.discovery.targets import Target
from rlkernel.verify.discovery.tree import Tree, leaf_ranges

MAX_INPUTS = 16384
_SIGNATURES = 24
_MOST_ORDERS = 16
_REPLAYS = 3
_REPEATS = 16


@dataclass(frozen=True)
class Revelation:
    """What was found out about a target. ``reason`` is empty where every bit was reproduced; ``notes`` say on what the
    order depends besides the shape."""

    target: str
    n: int
    rows: int
    columns: int
    orders: tuple[Order, ...]
    vectors: int
    probes: int
    calls: int
    seconds: float
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether the trees, executed, gave the bits of every output that was compared."""
        return not self.reason


def reveal(target: Target, *, vectors: int = 1000, seed: int = 0) -> Revelation:
    """Reveal the summation tree of every output of a target and check it by execution.

    Args:
        target: what to probe.
        vectors: at least so many random input rows are compared.
        seed: of the probes' pivots and of the random inputs; a tree does not depend on it.

    Raises:
        NotASummation: the probes contradict every tree, or two calls on the same input differ.
        ContractError: more inputs than can be probed, or the call failed.
    """
    if target.n > MAX_INPUTS:
        raise ContractError(f"{target.name} reduces {target.n:,} inputs; at most {MAX_INPUTS:,} can be probed")
    started = time.perf_counter()
    rng = np.random.default_rng(seed)
    initial = _initial(target)
    _require_fixed_order(target, rng)
    labels = _alike_outputs(target, rng)
    orders, probers = [], []
    for label in range(int(labels.max()) + 1):
        slots = _slots(labels == label)
        prober = Prober(target, slots)
        _require_all_inputs(prober, initial, rng)
        try:
            tree, arithmetic = _order(prober, initial, rng)
        except NotASummation as error:
            raise _sorting(target, rng) or error from error
        orders.append(Order(_where(labels == label), int((labels == label).sum()), tree, arithmetic))
        probers.append(prober)
    orders, used = check(target, orders, labels, vectors, rng)
    if any(order.differing and order.tree.fused for order in orders):
        orders, used = check(target, [_with_unit(target, order) for order in orders], labels, vectors, rng)
    orders = check_magnitudes(target, orders, labels, rng)
    reason = ""
    for order, prober in zip(orders, probers, strict=True):
        if not order.holds and not reason:
            reason = _reason(order, prober, initial, rng)
    return Revelation(
        target.name,
        target.n,
        target.rows,
        target.columns,
        tuple(orders),
        used,
        sum(prober.probes for prober in probers),
        sum(prober.calls for prober in probers),
        time.perf_counter() - started,
        reason,
        _notes(target, rng),
    )


def _sorting(target: Target, rng: np.random.Generator) -> NotASummation | None:
    words = sorted_sum(target, rng)
    return None if words is None else NotASummation(f"{target.name}: its order depends on the data: {words}")


def _initial(target: Target) -> float:
    """What comes out where every input is zero: the constant that the reduction starts from."""
    if target.positive:
        return 0.0
    values = target.sums(np.zeros((target.rows, target.n)))
    first = float(values.flat[0])
    if not (np.isfinite(values).all() and (values == first).all()):
        raise NotASummation(
            f"{target.name} gives {float(values.min())!r} to {float(values.max())!r} where every input is 0; a sum "
            "starts from one finite constant"
        )
    if first == 0:
        return 0.0
    form = target.input_format
    smallest = abs(first) * 2.0**-72
    if float(form.round(np.array([first]))[0]) != first or smallest < 2.0**form.smallest_exponent:
        raise NotASummation(
            f"{target.name} starts from {first!r}; its place in the order can be probed only if {target.dtype} holds "
            "it and numbers 2^72 times smaller"
        )
    return first


def _require_fixed_order(target: Target, rng: np.random.Generator) -> None:
    trial = target.trial(lambda count: draw(target, count, rng))
    one = bits_of(target.outputs(trial))
    for _ in range(3):
        other = bits_of(target.outputs(trial))
        if not np.array_equal(one, other):
            count = int((one != other).sum())
            raise NotASummation(
                f"{target.name} is not deterministic: {count} of {one.size} outputs differ between two calls on the "
                "same input; it has no fixed order"
            )


def _notes(target: Target, rng: np.random.Generator) -> tuple[str, ...]:
    for _ in range(4):
        trial = target.trial(lambda count: draw(target, count, rng))
        if not np.array_equal(bits_of(target.outputs(trial)), bits_of(target.outputs(trial, displaced=True))):
            return (
                "the order depends on where the inputs lie in memory: this one holds where they start at a multiple of "
                "64 bytes",
            )
    return ()


def _alike_outputs(target: Target, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """A number for every output [rows, columns]: equal numbers gave equal bits on equal operands."""
    shape = (target.rows, target.columns)
    if target.rows == 1 and (target.columns == 1 or not target.columns_alike):
        return np.zeros(shape, dtype=np.int64)
    signature = np.zeros(shape, dtype=np.uint64)
    row_vectors = draw(target, _SIGNATURES, rng)
    column_vectors = draw(target, _SIGNATURES, rng) if target.operands == 2 else None
    for k in range(_SIGNATURES):
        column = None if column_vectors is None else column_vectors[k]
        bits = bits_of(target.outputs(target.alike(row_vectors[k], column))).astype(np.uint64)
        if not target.columns_alike:
            bits = np.broadcast_to((bits * rng.integers(1, 1 << 62, bits.shape[1]).astype(np.uint64) * 2 + 1).sum(
                axis=1, keepdims=True, dtype=np.uint64), shape)  # fmt: skip
        signature = signature * np.uint64(0x9E3779B97F4A7C15) + bits
    _, labels = np.unique(signature, return_inverse=True)
    labels = labels.reshape(shape)
    count = int(labels.max()) + 1
    if count > _MOST_ORDERS:
        raise NotASummation(
            f"{target.name}: outputs with the same operands have {count} different results in one call, so their order "
            f"depends on their place; at most {_MOST_ORDERS} orders are told apart"
        )
    by_count = np.argsort(-np.bincount(labels.reshape(-1)), kind="stable")
    rank = np.empty_like(by_count)
    rank[by_count] = np.arange(count)
    return rank[labels]


def _slots(mask: npt.NDArray[np.bool_]) -> Slots:
    column = int(np.argmax(mask.sum(axis=0)))
    return Slots(tuple(int(row) for row in np.flatnonzero(mask[:, column])), column)


def _where(mask: npt.NDArray[np.bool_]) -> str:
    if mask.all():
        return "all outputs"
    rows, columns = mask.any(axis=1), mask.any(axis=0)
    parts = []
    if not rows.all():
        parts.append(f"rows {leaf_ranges(np.flatnonzero(rows).tolist())}")
    if not columns.all():
        parts.append(f"columns {leaf_ranges(np.flatnonzero(columns).tolist())}")
    if int(mask.sum()) != int(rows.sum()) * int(columns.sum()):
        parts.append(f"{int(mask.sum())} of {int(rows.sum()) * int(columns.sum())} outputs")
    return ", ".join(parts)


def _require_all_inputs(prober: Prober, initial: float, rng: np.random.Generator) -> None:
    """Every input must reach the output once, and unscaled."""
    target = prober.target
    if target.positive:
        return
    value = 2.0 ** (np.ceil(np.log2(abs(initial))) + 12) if initial else 1.0
    left = prober.sums_of([{leaf: value} for leaf in range(target.n)])
    missing = np.flatnonzero(np.abs(left) <= 4 * abs(initial)) if initial else np.flatnonzero(left == 0)
    if missing.size:
        names = leaf_ranges(missing.tolist())
        if _reach(prober, missing, rng):
            leaf = int(missing[0])
            raise NotASummation(
                f"{target.name} is no plain sum: {value:g} at input {leaf} and 0 elsewhere gives {float(left[leaf])!r} "
                f"({missing.size} of {target.n} inputs), though the output depends on inputs {names} where the others "
                "are not 0"
            )
        if missing.size == target.n:
            raise NotASummation(f"{target.name}: the output depends on none of its {target.n} inputs")
        raise NotASummation(
            f"{target.name}: inputs {names} do not reach the output; reveal the order of the others alone"
        )
    if not initial:
        turned = prober.sums_of([{leaf: -value} for leaf in range(target.n)])
        same = np.flatnonzero((turned == left) & (left == value))
        if same.size:
            leaf = int(same[0])
            raise NotASummation(
                f"{target.name} is no plain sum: it adds absolute values; {-value:g} at input {leaf} and 0 elsewhere "
                f"gives {float(turned[leaf])!r}, as {value:g} does ({same.size} of {target.n} inputs)"
            )
    scaled = np.flatnonzero(np.abs(left - value) > 4 * abs(initial) + target.noise)
    if scaled.size:
        leaf = int(scaled[0])
        raise NotASummation(
            f"{target.name} is no plain sum: {value:g} at input {leaf} and 0 elsewhere gives {float(left[leaf])!r} "
            f"({scaled.size} of {target.n} inputs)"
        )


def _reach(prober: Prober, leaves: npt.NDArray[np.int64], rng: np.random.Generator) -> bool:
    """Whether other values at these inputs change a bit of an output, while none of the inputs is 0."""
    target, (rows, column) = prober.target, (list(prober.slots.rows), prober.slots.column)
    for _ in range(8):
        trial = target.trial(lambda count: draw(target, count, rng))
        other = trial.a.copy()
        other[:, leaves] = draw(target, target.rows, rng)[:, leaves]
        before, after = (
            bits_of(target.outputs(replace(trial, a=operands))[rows, column]) for operands in (trial.a, other)
        )
        if not np.array_equal(before, after):
            return True
    return False


def _order(prober: Prober, initial: float, rng: np.random.Generator) -> tuple[Tree, Arithmetic]:
    """The tree and its arithmetic. Raises NotASummation, which says where the answers contradict each other."""
    before = deepcopy(rng)

    def probe(rng: np.random.Generator) -> tuple[Tree, Arithmetic]:
        tree = _tree(prober, initial, rng)
        return tree, find_arithmetic(prober, tree, initial or None)

    try:
        return probe(rng)
    except NotASummation as error:
        # the same probes once more: a single call that came out otherwise contradicts every tree
        for _ in range(_REPLAYS):
            try:
                probe(deepcopy(before))
            except NotASummation as other:
                if str(other) == str(error):
                    continue
            raise NotASummation(
                f"{prober.target.name} is not deterministic: the same probes were answered otherwise a second time; it "
                "has no fixed order"
            ) from error
        raise


def _tree(prober: Prober, initial: float, rng: np.random.Generator) -> Tree:
    target = prober.target
    if target.positive:
        return reveal_tree(Triples(prober), target.n, target.name, rng, triples=True)
    countable = target.input_format.countable
    if target.output == "bfloat16" or not _counts_exactly(prober, countable, initial, rng):
        countable = min(countable, 128)
    if target.range_format.name == "float16":
        countable = min(countable, target.range_format.countable)
    if initial and target.input_format.bits < 24:
        countable = min(countable, 32)
    return reveal_tree(Masks(prober, countable, initial), target.n, target.name, rng, initial=bool(initial))


def _counts_exactly(prober: Prober, countable: int, initial: float, rng: np.random.Generator) -> bool:
    """Whether units add up exactly; an accumulator narrower than the inputs cannot count far."""
    n, unit = prober.target.n, prober.target.input_format.unit
    if n <= 128 or initial:
        return n <= 128
    sizes = rng.integers(1, min(n, countable) + 1, 64)
    sets = [rng.choice(n, size, replace=False) for size in sizes]

    def fill(row: Float64, k: int) -> None:
        row[sets[k]] = unit

    return bool((np.abs(prober.sums(len(sets), fill) / unit - sizes) <= prober.target.noise).all())


def _with_unit(target: Target, order: Order) -> Order:
    """The order with a matrix unit's own model, where the order has fused adders that add in another way."""
    unit = unit_of(order.tree, target.dtype) if order.differing and target.operands == 2 else None
    if unit is None or order.arithmetic.adder is None:
        return order
    return replace(order, arithmetic=replace(order.arithmetic, adder=replace(order.arithmetic.adder, unit=unit)))


def _reason(order: Order, prober: Prober, initial: float, rng: np.random.Generator) -> str:
    """Why a tree does not reproduce the bits: looks for an order that depends on the data."""
    target = prober.target
    if order.unstable:
        return (
            f"{target.name} is not deterministic: {order.unstable:,} outputs had other bits when it was called "
            "again on the same input; it has no fixed order"
        )
    if order.parts:
        return (
            f"{target.name}: its order, or its arithmetic, depends on the magnitude of its inputs: around 1 the "
            f"revealed tree gives its bits, and the first difference is at {order.parts}"
        )
    if (sorting := _sorting(target, rng)) is not None:
        return str(sorting)
    undetermined = f"{target.name} is not deterministic: calls on the same input differ; it has no fixed order"
    trial = target.trial(lambda count: draw(target, count, rng))
    if len({bits_of(target.outputs(trial)).tobytes() for _ in range(_REPEATS)}) > 1:
        return undetermined
    share = f"{order.differing:,} of {order.checked:,} outputs have other bits than the revealed tree gives"
    if order.tree.fused:
        return (
            f"{target.name}: {share}. It adds in the revealed order, but its fused adders do not add as any unit "
            "that is modelled here (or its order depends on the data)"
        )
    if not target.positive and not initial and target.n > 1:
        pairs = [(int(i), int(j)) for i, j in (rng.choice(target.n, 2, replace=False) for _ in range(64))]
        sizes = [order.tree.sizes[order.tree.meeting(i, j)] for i, j in pairs]
        countable = min(128, target.input_format.countable)
        variants: list[tuple[str, Callable[[], Masks]]] = [
            ("signs of its inputs", lambda: Masks(prober, countable, flipped=True)),
            ("size of its inputs", lambda: Masks(prober, countable, scale=2.0**-4)),
        ]
        if target.range_format.smallest_exponent <= -126:
            # the masks themselves are large: an order that looks at the largest input is seen with smaller ones
            variants += [
                ("size of its inputs", lambda: Masks(prober, countable, scale=2.0**-60)),
                ("size of its inputs", lambda: Masks(prober, countable, scale=2.0**-90)),
            ]
        for what, make in variants:
            found, again = _sizes(make(), pairs), _sizes(make(), pairs)
            if found != again:
                return undetermined
            if found != sizes:
                return f"{target.name}: {share}; its order depends on the {what}"
    return (
        f"{target.name} is not reproduced by a summation tree: {share}. Its partial sums are not plain roundings to "
        f"{order.arithmetic.accumulator} (compensated or wider somewhere, or an order that depends on the data)"
    )


def _sizes(masks: Masks, pairs: list[tuple[int, int]]) -> list[int]:
    """Sizes of the partial sums in which pairs meet; empty where the answers are those of no sum."""
    try:
        return masks(pairs)
    except NotASummation:
        return []
