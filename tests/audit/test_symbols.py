"""Symbols: equal for equal expressions, different where the order, a rounding or an operand differs."""

from __future__ import annotations

import itertools

import numpy as np

from rlkernel.verify.audit import symbols as s

A, B, C, D = (s.element(0, np.array([i])) for i in range(4))


def test_commutes_and_does_not_associate() -> None:
    assert (s.add(A, B) == s.add(B, A)).all()
    assert (s.mul(A, B) == s.mul(B, A)).all()
    assert (s.fma(A, B, C) == s.fma(B, A, C)).all()
    assert (s.add(s.add(A, B), C) != s.add(A, s.add(B, C))).all()
    assert (s.fma(A, B, C) != s.add(s.mul(A, B), C)).all()
    assert (s.cast_bf16(s.add(A, B)) != s.add(A, B)).all()


def test_signs_of_factors_move() -> None:
    assert (s.mul(s.negative(A), B) == s.mul(A, s.negative(B))).all()
    assert (s.mul(s.negative(A), B) == s.negative(s.mul(A, B))).all()
    assert (s.fma(s.negative(A), B, C) == s.fma(A, s.negative(B), C)).all()
    assert (s.fma(s.negative(A), B, C) != s.fma(A, B, C)).all()


def test_all_orders_of_four_summands_differ_unless_they_commute() -> None:
    chains = {int(s.add(s.add(s.add(a, b), c), d)[0]) for a, b, c, d in itertools.permutations((A, B, C, D))}
    assert len(chains) == 12  # the first two summands commute
    assert len({int(s.tree(np.stack(p))[0]) for p in itertools.permutations((A, B, C, D))}) == 3


def test_a_step_has_no_order_inside_and_an_order_outside() -> None:
    a, b = s.element(0, np.arange(32)).reshape(1, 32), s.element(1, np.arange(32)).reshape(1, 32)
    zero = np.full((1, 1), s.constant(0)[0])
    inside = np.random.default_rng(0).permutation(16)
    first, again = s.unit_products(a[:, :16], b[:, :16]), s.unit_products(a[:, inside], b[:, inside])
    second = s.unit_products(a[:, 16:], b[:, 16:])
    assert (first == again).all()
    ascending = s.unit_step(second, s.unit_step(first, zero, False), False)
    assert (ascending != s.unit_step(first, s.unit_step(second, zero, False), False)).all()
    assert (ascending != s.unit_step(first + second, zero, False)).all()


def test_padding() -> None:
    zero, minus_zero = s.constant(0), s.constant(0x80000000)
    assert (s.fma(minus_zero, zero, A) == A).all()
    assert (s.fma(zero, zero, A) != A).all()  # it would turn -0 into +0
    assert (s.add(A, minus_zero) == A).all()
    assert (s.add(A, zero) != A).all()
    nothing = s.unit_products(np.full((1, 8), zero[0]), np.full((1, 8), zero[0]))
    assert (s.unit_step(nothing, A[None], True) == A).all()
    assert (s.unit_step(nothing, A[None], False) != A).all()


def test_division_by_a_power_of_two_is_a_product() -> None:
    four, three = (np.full(1, x, np.float32).view(np.uint32) for x in (4.0, 3.0))
    quarter = s.constant(np.full(1, 0.25, np.float32).view(np.uint32))
    assert (s.div(A, s.constant(four), four, True) == s.mul(A, quarter)).all()
    assert (s.div(A, s.constant(three), three, True) == s.operation("div.rn.f32", A, s.constant(three))).all()
    assert (s.div(A, B, four, False) == s.operation("div.rn.f32", A, B)).all()
