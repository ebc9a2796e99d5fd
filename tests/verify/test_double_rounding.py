"""A fused multiply-add through float64 differs on problems of every region that has one, and is refused by name."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.presets import PRESETS
from rlkernel.verify.admission import double_rounding
from rlkernel.verify.admission.bits import differing_elements, pattern
from rlkernel.verify.admission.execute import Executor, reference_operation
from rlkernel.verify.admission.generate import problems_of
from rlkernel.verify.admission.step import STEP_REGIONS, ReferenceStep, step_problems
from rlkernel.verify.admission.values import generator
from rlkernel.verify.admission.variants import varied_operation
from rlkernel.verify.admission.variations import GENERIC, fma_through_float64

EMULATED = next(v for v in GENERIC if v.what == "a fused multiply-add through float64, which rounds twice")
BOTH = ("trainer_forward", "trainer_backward")
REGIONS = [
    *((region, case) for region in ("qkv_proj", "gate_up_proj", "o_proj", "down_proj") for case in BOTH),
    *((region, case) for region in ("rms_norm", "final_norm", "rope", "logprob", "attention") for case in BOTH),
    ("qk_norm", "trainer_backward"), ("attention", "rollout_decode"),
    ("gradient_norm", "optimizer_step"), ("adamw", "optimizer_step"),
]  # fmt: skip


def contract_of(dtype, tp):
    config = replace(PRESETS["tiny-qwen3"], hidden_size=320, num_heads=8, num_kv_heads=4, intermediate_size=64 * tp)
    return build_contract(config, dtype=dtype, topology=Topology(tp=tp))


def rounded(value: Fraction, bits: int) -> Fraction:
    """To nearest even with so many significant bits."""
    exponent = 0
    while abs(value) * Fraction(2) ** -exponent >= 2**bits:
        exponent += 1
    while abs(value) * Fraction(2) ** -exponent < 2 ** (bits - 1):
        exponent -= 1
    return round(value * Fraction(2) ** -exponent) * Fraction(2) ** exponent


def test_pairs_are_beside_ties_on_both_sides_and_with_both_signs():
    rng = generator(3, "pairs")
    (a, x), (b, y) = (double_rounding.pairs(rng, (40,)) for _ in range(2))
    kinds = set()
    for tail_a, factor_a, tail_b, factor_b in zip(a, x, b, y, strict=True):
        exact = Fraction(float(tail_a)) * Fraction(float(tail_b)) + Fraction(float(factor_a)) * Fraction(
            float(factor_b)
        )
        once, twice = rounded(exact, 24), rounded(rounded(exact, 53), 24)
        assert once != twice
        kinds.add((exact > 0, once > twice))
    assert len(kinds) == 4


@pytest.mark.parametrize("constant", [0.9, 0.95, 0.999])
def test_addends_beside_near_ties_round_otherwise_twice(constant):
    rng, beta = generator(4, "near", constant), np.float32(constant)
    values, missing = double_rounding.near_ties(rng, beta, 64)
    addends = np.nextafter(missing.astype(np.float32), np.float32(np.inf))
    hit = double_rounding.beside(beta, values, missing, addends)
    assert hit.any() and not hit.all()
    for value, addend, expected in zip(values, addends, hit, strict=True):
        exact = Fraction(float(beta)) * Fraction(float(value)) + Fraction(float(addend))
        assert (rounded(exact, 24) != rounded(rounded(exact, 53), 24)) == bool(expected)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("region", "case"), REGIONS)
def test_the_emulation_differs_in_every_region_that_has_the_primitive(region, case, tp):
    contract, workers = contract_of("float32", tp), Workers(1)
    varied = varied_operation(contract, region, case, EMULATED)
    differing: dict[str, int] = {}
    if region in STEP_REGIONS:
        found = [p for p in step_problems(region, 0) if double_rounding.HAZARD in p.hazards]
        operations = (ReferenceStep(contract, region), varied)
        runs = [tuple(op.run(p.arguments, workers, False) for op in operations) for p in found]
    else:
        executor = Executor(contract, workers)
        found = [p for p in problems_of(contract, region, case) if double_rounding.HAZARD in p.hazards]
        reference = reference_operation(contract, region)
        runs = [(executor.run(reference, p, case), executor.run(varied, p, case)) for p in found]
    for want, have in runs:
        for name, value in want.items():
            assert value.dtype != np.float32 or np.isfinite(value).all()
            differing[name] = differing.get(name, 0) + int((pattern(value) != pattern(have[name])).sum())
    without = {"master", "weight"} if region == "adamw" else set()  # a step is added to them, rounded apart
    assert differing and all(count for name, count in differing.items() if name not in without), differing


def test_chains_of_bfloat16_values_have_no_such_problem():
    contract = contract_of("bfloat16", 1)
    for region, case in REGIONS:
        if region not in STEP_REGIONS:
            assert all(double_rounding.HAZARD not in p.hazards for p in problems_of(contract, region, case))


def test_products_of_bfloat16_values_never_differ():
    rng = generator(5, "bfloat16")
    total = torch.from_numpy((rng.standard_normal(200_000) * 2.0 ** rng.integers(-30, 31, 200_000)).astype(np.float32))
    a, b = (torch.from_numpy(rng.standard_normal(200_000)).bfloat16() for _ in range(2))
    scaled = a * torch.from_numpy(2.0 ** rng.integers(-30, 31, 200_000)).bfloat16()
    from rlkernel.reference.arith import fma32

    assert torch.equal(fma_through_float64(scaled, b, total), fma32(scaled, b, total))


def test_a_swiglu_associated_otherwise_differs_in_bfloat16_without_many_rows():
    contract = contract_of("bfloat16", 1)
    executor, case = Executor(contract, Workers(1)), "trainer_forward"
    (problem,) = [p for p in problems_of(contract, "swiglu", case) if p.hazards == ("borders of bfloat16",)]
    from rlkernel.verify.admission.catalogue import variations_for

    want = executor.run(reference_operation(contract, "swiglu"), problem, case)
    for what in ("a product that is associated otherwise", "gate times up first"):
        variation = next(v for v in variations_for("swiglu", case) if v.what == what)
        assert differing_elements(
            want, executor.run(varied_operation(contract, "swiglu", case, variation), problem, case)
        )
    assert not problem.bulk and sum(v.size for v in want.values()) < 100
