"""Trees: canonical form, notation and its reader, drawing, execution, exact arithmetic."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.errors import ContractError
from rlkernel.verify.discovery.drawing import draw_svg
from rlkernel.verify.discovery.formats import FORMATS, add_to_float32, add_to_odd, fma64, round_to_bits
from rlkernel.verify.discovery.notation import compact, indented, summary
from rlkernel.verify.discovery.reading import parse
from rlkernel.verify.discovery.tree import Tree, TreeBuilder, leaf_ranges
from tests.verify.sums import build, executed


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree of up to 24 leaves, nodes of 2 to 5 children."""
    leaves = draw(st.integers(1, 24))
    builder = TreeBuilder(leaves)
    items = draw(st.permutations(range(leaves)))
    while len(items) > 1:
        count = min(len(items), draw(st.sampled_from([2, 2, 2, 3, 5])))
        items = [*items[count:], builder.join(*items[:count])]
    return builder.build(items[0])


@given(trees())
def test_the_notation_is_lossless(tree: Tree) -> None:
    assert parse(compact(tree), tree.leaves) == tree
    assert indented(tree) and summary(tree)


@given(trees(), st.randoms())
def test_canonical_form_does_not_depend_on_the_order_of_children(tree: Tree, random: object) -> None:
    builder = TreeBuilder(tree.leaves)
    items = list(range(tree.leaves))
    for children in tree.nodes:
        mixed = [items[child] for child in children]
        random.shuffle(mixed)  # type: ignore[attr-defined]
        items.append(builder.join(*mixed))
    assert builder.build(items[-1]) == tree


@given(trees(), st.data())
def test_trees_with_other_partial_sums_differ(tree: Tree, data: st.DataObject) -> None:
    names = list(data.draw(st.permutations(range(tree.leaves))))
    other = tree.relabelled(names)
    assert (other == tree) == (set(other.partial_sums) == set(tree.partial_sums))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "input"),
        ("chain(0..63)", "chain of 64"),
        ("chain(63..0 by -1)", "chain of 64"),
        ("tree(0..63)", "tree of 64"),
        ("tree(0..12)", "tree of 13"),
        ("chain(0..56 by 8, 1, 2..7, 9..15, 17..23, 25..31, 33..39, 41..47, 49..55, 57..63)", "chain of 64"),
        ("tree(chain(0..1016 by 8) x8 by 1)", "tree of 8 chains of 128"),
        ("chain(chain(0..63) x16 by 64)", "chain of 16 chains of 64"),
        ("chain(tree(0..7) x16 by 8)", "chain of 16 trees of 8"),
        ("chain({0..15} x8 by 16)", "chain of 8 fused sums of 16"),
        ("tree(chain(0, 256) x44 by 1, 44..255)", "tree of (44 chains of 2 and 212 inputs)"),
    ],
)
def test_regular_trees_read_as_they_are_written(text: str, words: str) -> None:
    tree = parse(text)
    assert parse(compact(tree)) == tree
    assert summary(tree) == words
    assert len(compact(tree)) <= len(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain(0..3", "expected"),
        ("chain(0..3) 4", "the end"),
        ("chain(0..5 by 2)", "does not end"),
        ("heap(0..3)", "cannot have"),
        ("chain(0, 0)", "2 times"),
        ("chain(0, 2)", "leaf 1 is in the tree 0 times"),
        ("chain(0 x0 by 1)", "from 1 on"),
    ],
)
def test_what_is_no_tree_is_refused(text: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        parse(text)


def test_a_deep_chain_needs_no_recursion() -> None:
    tree = build(5000, lambda b: b.chain(range(5000)))
    assert compact(tree) == "chain(0..4999)"
    assert tree.heights[tree.root] == 4999
    assert tree.meeting(0, 4999) == tree.root


def test_ranges() -> None:
    assert leaf_ranges([0, 1, 2, 3, 8, 16, 24, 31]) == "0..3, 8..24 by 8, 31"
    assert leaf_ranges(range(0, 100, 7), most=2) == "0..98 by 7"
    assert leaf_ranges([1, 3, 4, 9, 20], most=3) == "1, 3, ... (5 in all)"


def test_drawings_are_well_formed() -> None:
    for text in ("0", "chain(0..9)", "tree(chain(0..24 by 8) x8 by 1)", "chain({0..15} x8 by 16)", "tree(0..511)"):
        root = ElementTree.fromstring(draw_svg(parse(text), "a < b & c"))
        marks = [item for item in root.iter("{http://www.w3.org/2000/svg}rect") if "hsl" in item.get("fill", "")]
        assert len(marks) == parse(text).leaves


def test_execution_adds_in_tree_order() -> None:
    x = np.array([[1.0, 2.0**-24, 2.0**-24, 0.0]], dtype=np.float32)
    assert executed(parse("chain(0..3)"), x)[0] == 1.0
    assert executed(parse("tree(1, 2, 0, 3)"), x)[0] == np.float32(1.0 + 2.0**-23)
    mirrored = parse("tree(3, 0, 2, 1)")
    assert mirrored == parse("tree(1, 2, 0, 3)")  # addition commutes
    assert parse("tree(0..3)") != mirrored


def test_a_tree_with_two_leaves_exchanged_gives_other_bits() -> None:
    tree = parse("tree(chain(0..56 by 8) x8 by 1)")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 64)).astype(np.float32)
    swapped = tree.relabelled([9 if k == 0 else 0 if k == 9 else k for k in range(64)])
    assert swapped != tree
    assert (executed(swapped, x).view(np.uint32) != executed(tree, x).view(np.uint32)).any()
    mirrored = tree.relabelled([8 if k == 0 else 0 if k == 8 else k for k in range(64)])
    assert mirrored == tree  # 0 and 8 are the first two of a chain


def _exact(value: float) -> Fraction:
    return Fraction(float(value))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_sums_are_rounded_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = np.ldexp(rng.integers(-(2**48), 2**48, 64).astype(np.float64), rng.integers(-60, 20, 64))
    b = np.ldexp(rng.integers(-(2**24), 2**24, 64).astype(np.float64), rng.integers(-60, 20, 64))
    ties = np.ldexp(rng.integers(2**23, 2**24, 64) + 0.5, rng.integers(-10, 10, 64))
    a[:32] = ties[:32]
    b[:32] = np.ldexp(rng.choice([-1.0, 0.0, 1.0], 32), -70)
    single, odd = add_to_float32(a, b), add_to_odd(a, b)
    bfloat = FORMATS["bfloat16"].round(odd)
    for k in range(64):
        exact = _exact(a[k]) + _exact(b[k])
        near = np.float32(odd[k])
        for value, grid in ((single[k], np.spacing(near)), (bfloat[k], np.spacing(near) * 2**16)):
            # no value of the grid is nearer; a tie goes to the even one
            assert abs(_exact(value) - exact) <= _exact(abs(grid)) / 2
        assert single[k] == near


def test_subnormal_sums_are_rounded_once() -> None:
    a = np.array([2.0**-149 * 1.5, 2.0**-149 * 2.5, 2.0**-127])
    b = np.array([2.0**-230, -(2.0**-230), 2.0**-151])
    assert list(add_to_float32(a, b)) == [np.float32(2.0**-148), np.float32(2.0**-148), np.float32(2.0**-127)]


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_fma64_is_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal(16), rng.standard_normal(16)
    c = -a * b * (1 + rng.integers(-2, 3, 16) * 2.0**-52) if seed % 2 else rng.standard_normal(16)
    for k, value in enumerate(fma64(a, b, c)):
        exact = _exact(a[k]) * _exact(b[k]) + _exact(c[k])
        assert float(exact) == value  # Fraction to float rounds to nearest even


def test_rounding_to_bits() -> None:
    values = np.array([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.99999, 2.0**-133, 2.0**-134, 0.0, np.inf])
    nearest = round_to_bits(values, 8, -126)
    assert list(nearest) == [1.0, 1.0 + 2.0**-6, -2.0, 2.0**-133, 0.0, 0.0, np.inf]
    truncated = round_to_bits(values, 8, -126, "truncate")
    assert list(truncated[:3]) == [1.0, 1.0 + 2.0**-7, -1.9921875]
