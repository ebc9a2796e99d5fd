"""What besides the order decides the bits, found by a few more probes: precision, fused products, fused adders, +0."""

from __future__ import annotations

import numpy as np

from rlkernel.verify.discovery.arithmetic import Arithmetic, FusedAdder, Mode
from rlkernel.verify.discovery.formats import number_format
from rlkernel.verify.discovery.probe import NotASummation, Prober
from rlkernel.verify.discovery.targets import PositiveTarget
from rlkernel.verify.discovery.tree import Tree

_KEPT_BITS = {52: "float64", 23: "float32", 10: "float16", 7: "bfloat16"}
_MOST_FRACTION_BITS = 48


def find_arithmetic(prober: Prober, tree: Tree, initial: float | None) -> Arithmetic:
    """Probe the arithmetic of a target whose tree is known.

    Raises:
        NotASummation: an answer that no arithmetic known here gives.
    """
    target = prober.target
    products = target.operands == 2
    if isinstance(target, PositiveTarget):
        fused = _fused_squares(prober, tree, target) if products else frozenset()
        bits = target.input_format.bits
        return Arithmetic(
            target.dtype, "float32", target.output, bits, products=products, fused=fused, starts_at_zero=None
        )
    accumulator = _accumulator(prober, tree, initial or 0.0)
    bits, mode = _operands(prober, initial or 0.0)
    exceptions = () if initial else _exceptions(prober, tree, accumulator)
    zero = initial is None and _starts_at_zero(prober)
    adder = _fused_adder(prober, tree) if tree.fused else None
    fused = frozenset()
    if products and not tree.fused and 2 * bits > number_format(accumulator).bits:
        fused = _fused_products(prober, tree, bits) if initial is None else frozenset(range(target.n))
    return Arithmetic(
        inputs=target.dtype,
        accumulator=accumulator,
        output=target.output,
        operand_bits=bits,
        operand_mode=mode,
        products=products,
        fused=fused,
        starts_at_zero=zero,
        initial=initial,
        adder=adder,
        exceptions=exceptions,
    )


def _accumulator(prober: Prober, tree: Tree, initial: float) -> str:
    """Two inputs meet, a third cancels the larger: what is left of the smaller one tells the bits of their sum."""
    target = prober.target
    inputs = range(target.n)
    pair, outside = None, None
    for k in range(len(tree.nodes)):
        members = tree.partial_sums[k]
        inside = [leaf for leaf in inputs if members >> leaf & 1]
        if len(inside) >= 2 and len(inside) < target.n:
            pair = inside[:2]
            outside = next(leaf for leaf in inputs if not members >> leaf & 1)
            break
    if pair is None or outside is None:
        # two inputs, or one fused adder: the sum is seen only after it is rounded to the output
        wide = target.output if target.output == "float64" else "float32"
        return wide if tree.fused else target.output
    large = 2.0 ** (np.ceil(np.log2(initial)) + 60) if (initial := abs(initial)) else 1.0
    rows = [{pair[0]: large, pair[1]: large * 2.0**-bits, outside: -large} for bits in _KEPT_BITS]
    left = np.abs(prober.sums_of(rows))
    for name, value in zip(_KEPT_BITS.values(), left, strict=True):
        if value > 4 * initial:
            return name
    raise NotASummation(
        f"{target.name}: of 1 + 2^-7 - 1 nothing is left (inputs {pair[0]}, {pair[1]}, {outside}); every "
        f"accumulator that is known here has 8 bits or more ({', '.join(_KEPT_BITS.values())})"
    )


def _exceptions(prober: Prober, tree: Tree, usual: str) -> tuple[tuple[int, str], ...]:
    """Nodes below the root whose sum is kept with other bits than usual, and in which format.

    Leaves of two children of the node meet in it, and a leaf of the node's sibling cancels the larger one at once.
    The root's own rounding is not seen: it counts as the widest of its children's.
    """
    if not tree.nodes or tree.fused:
        return ()
    nodes = range(len(tree.nodes) - 1)
    tests = {bit: [_cancelling(tree, node, bit) for node in nodes] for bit in _KEPT_BITS}
    bits = list(_KEPT_BITS)
    place = next(k for k, bit in enumerate(bits) if _KEPT_BITS[bit] == usual)
    formats = [usual] * len(nodes)
    kept = prober.sums_of(tests[bits[place]]) > 0
    wider = prober.sums_of(tests[bits[place - 1]]) > 0 if place else np.zeros(len(nodes), dtype=bool)
    for node in nodes:
        if kept[node] and not wider[node]:
            continue
        left = prober.sums_of([tests[bit][node] for bit in bits]) > 0
        formats[node] = _KEPT_BITS[bits[int(np.argmax(left))]] if left.any() else usual
    below = [formats[item - tree.leaves] for item in tree.children(tree.root) if item >= tree.leaves]
    formats.append(max(below, key=lambda name: number_format(name).bits, default=usual))
    return tuple((node, name) for node, name in enumerate(formats) if name != usual)


def _cancelling(tree: Tree, node: int, bit: int) -> dict[int, float]:
    x, y = (tree.first_leaves[child] for child in tree.nodes[node][:2])
    item = tree.leaves + node
    z = next(tree.first_leaves[child] for child in tree.children(tree.parents[item]) if child != item)
    return {x: 1.0, y: 2.0**-bit, z: -1.0}


def _operands(prober: Prober, initial: float) -> tuple[int, Mode]:
    """Significand bits that are kept of an input, and how the others are dropped."""
    form = prober.target.input_format
    if prober.target.n == 1 or initial:
        return form.bits, "nearest"
    tests = list(range(form.bits - 1, 1, -1))
    left = prober.sums_of([{0: 1.0 + 2.0**-bit, 1: -1.0} for bit in tests])
    kept = next((bit for bit, value in zip(tests, left, strict=True) if value > 0), 0)
    if kept == form.bits - 1:
        return form.bits, "nearest"
    if kept == 0:
        raise NotASummation(f"{prober.target.name} keeps no bit of 1.25; its inputs have fewer than 3 bits")
    value = 1.0 + 2.0**-kept + 2.0 ** -(kept + 1) + (2.0 ** -(kept + 2) if kept + 2 < form.bits else 0.0)
    rest = prober.sums_of([{0: value, 1: -1.0}])[0]
    return kept + 1, "nearest" if rest > 2.0**-kept else "truncate"


def _starts_at_zero(prober: Prober) -> bool:
    total = prober.sums_of([{}], others=-0.0)[0]
    return not bool(np.signbit(total))


def _fused_products(prober: Prober, tree: Tree, bits: int) -> frozenset[int]:
    """Leaves whose product is not rounded before it is added.

    With f = 1 + 2^-(bits-1), the product f * f = f + 2^-(bits-1) + 2^-(2 bits-2) loses its last bit when it is rounded;
    -1 * f at a leaf that meets it directly leaves 2^-(bits-1), and the last bit if the product was not rounded.
    """
    if tree.leaves == 1:
        return frozenset()
    factor = 1.0 + 2.0 ** -(bits - 1)
    rows = []
    for leaf in range(tree.leaves):
        sibling = tree.sibling_leaf(leaf)
        assert sibling is not None
        rows.append({leaf: factor, sibling: -1.0})
    left = prober.sums_of(rows, factor=factor)
    return frozenset(leaf for leaf, value in enumerate(left) if value > 2.0 ** -(bits - 1))


def _fused_squares(prober: Prober, tree: Tree, target: PositiveTarget) -> frozenset[int]:
    """As :func:`_fused_products`, without negative terms.

    (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 loses its last bit when it is rounded to float32; (2^-12)^2 at a leaf that meets
    it directly makes it 1 + 2^-11 + 2^-23 where it was not rounded, and 1 + 2^-11 (the even neighbour) where it was.
    """
    if tree.leaves == 1:
        return frozenset()
    rows = []
    for leaf in range(tree.leaves):
        sibling = tree.sibling_leaf(leaf)
        assert sibling is not None
        rows.append({leaf: 1.0 + 2.0**-12, sibling: 2.0**-12})
    return frozenset(leaf for leaf, above in enumerate(prober.exceeding(rows, 1.0 + 2.0**-11)) if above)


def _fused_adder(prober: Prober, tree: Tree) -> FusedAdder:
    """How far below the largest exponent a fused adder keeps terms, and how it rounds the sum."""
    target = prober.target
    node = next(k for k, children in enumerate(tree.nodes) if len(children) > 2)
    leaves = [tree.first_leaves[child] for child in tree.nodes[node]]
    # leaves that are children themselves come first: they reach the adder unrounded
    leaves.sort(key=lambda leaf: leaf not in tree.nodes[node])
    x, y, z = leaves[:3]
    large = 2.0**12 if target.dtype == "float16" else 1.0
    tests = list(range(_MOST_FRACTION_BITS, 1, -1))
    if target.dtype == "float16":
        tests = [bit for bit in tests if bit <= 36]
    left = prober.sums_of([{x: large, y: large * 2.0**-bit, z: -large} for bit in tests])
    fraction = next((bit for bit, value in zip(tests, left, strict=True) if value > 0), 0)
    if fraction == 0:
        raise NotASummation(
            f"{target.name}: a fused adder of {len(leaves)} terms keeps nothing beside its largest term"
        )
    outside = next((leaf for leaf in range(target.n) if not tree.partial_sums[node] >> leaf & 1), None)
    row = {x: large, y: large * 3.0 * 2.0**-25}
    if outside is not None:
        row[outside] = -large
    rounded = prober.sums_of([row])[0] - (large if outside is None else 0.0)
    raw = True
    if target.operands == 2:
        left = prober.sums_of([{x: 1.5 * large, y: large * 2.0**-fraction, z: -1.5 * large}], factor=1.5)
        raw = bool(left[0] > 0)
    return FusedAdder(fraction, "nearest" if rounded > 0 else "truncate", raw)
