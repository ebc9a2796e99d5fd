"""Admission: the CPU kernels are admitted, deviations are refused with the first difference and the point."""

from __future__ import annotations

import numpy as np
import pytest

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import activation, norm
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.presets import PRESETS
from rlkernel.ops.head import LinearLogprob
from rlkernel.ops.portable import RmsNorm, RowParallel, SwiGlu, portable_ops
from rlkernel.verify.admission.admit import admit, cases_of
from rlkernel.verify.admission.bits import compare, pattern
from rlkernel.verify.admission.budget import Budget
from rlkernel.verify.admission.catalogue import variations_for
from rlkernel.verify.admission.certificate import AdmissionRefused
from rlkernel.verify.admission.execute import Executor, reference_operation
from rlkernel.verify.admission.generate import problems_of
from rlkernel.verify.admission.influence import dependency_difference
from rlkernel.verify.admission.plain import PlainLinear
from rlkernel.verify.admission.values import HAZARDS, generator, make
from rlkernel.verify.admission.variants import POINTS, Line, Variation, copy_interpreter, varied_operation
from rlkernel.verify.admission.variations import GENERIC
from vime.train.admission import step_candidates

CONTRACTS = {dtype: build_contract(PRESETS["tiny-qwen3"], dtype=dtype) for dtype in ("float32", "bfloat16")}
WORKERS = Workers(1)
FAST = ("embedding", "rms_norm", "qk_norm", "rope", "residual_add", "swiglu")


def operations():
    return {**portable_ops(), "logprob": LinearLogprob(), **dict(step_candidates())}


STEP = ("gradient_norm", "adamw", "loss")
HERE = [
    *((region, "float32") for region in (*FAST, "o_proj", "logprob", *STEP)),
    *((region, "bfloat16") for region in ("rms_norm", "rope", "swiglu", "adamw")),
]


@pytest.mark.parametrize(("region", "dtype"), HERE)  # every run admits all of them at its first use
def test_the_cpu_kernels_are_admitted(region, dtype):
    contract, operation = CONTRACTS[dtype], operations()[region]
    certificate = admit(operation, region, cases_of(region, contract), contract, workers=WORKERS)
    assert certificate.outputs > (30 if region == "gradient_norm" else 1000)
    assert "zero rows" in certificate.shape_classes
    if region not in ("embedding", "loss"):
        assert {"normal", "ties", "subnormals", "signed zeros", "exponent spread"} <= set(certificate.hazards)
    assert set(certificate.cases) == set(cases_of(region, contract))


def test_projections_with_claimed_degrees_and_a_bias_are_admitted():
    contract = build_contract(PRESETS["tiny-qwen2"], topology=Topology(tp=2))
    for region in ("qkv_proj", "down_proj"):
        admit(operations()[region], region, ("trainer_forward", "trainer_backward"), contract, workers=WORKERS)


def test_attention_is_admitted_with_stale_pages_and_masked_blocks():
    contract = CONTRACTS["float32"]
    certificate = admit(operations()["attention"], "attention", "rollout_decode", contract, workers=WORKERS)
    assert {"stale NaN in unused pages", "one row each", "chunks"} <= set(certificate.shape_classes)
    assert {"normal", "ties", "subnormals", "NaN", "infinities"} <= set(certificate.hazards)


def test_the_plain_chain_is_a_link_of_its_own():
    certificate = admit(PlainLinear(), "down_proj", "trainer_forward", CONTRACTS["bfloat16"], workers=WORKERS)
    assert certificate.links[0].left == "interpreter" and certificate.links[0].right == "plain.fma_chain"


def test_a_larger_budget_compares_more():
    budget = Budget("full", rounds=2, outputs=200_000)
    certificate = admit(SwiGlu(), "swiglu", "trainer_forward", CONTRACTS["float32"], budget=budget, workers=WORKERS)
    assert certificate.outputs >= 200_000 and certificate.budget == "full"
    few = Budget("full", outputs=1_000_000, most_rounds=2)
    norm = admit(operations()["gradient_norm"], "gradient_norm", "optimizer_step", CONTRACTS["float32"], budget=few)
    assert norm.outputs < 1000


LINEAR = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")


@pytest.mark.parametrize("region", LINEAR)
@pytest.mark.parametrize("case", ["trainer_forward", "trainer_backward"])
def test_the_plain_kernel_is_the_contract_s_whatever_the_shape(region, case):
    contract = build_contract(PRESETS["tiny-qwen2"], dtype="bfloat16", topology=Topology(tp=2))
    executor, interpreter = Executor(contract, WORKERS), reference_operation(contract, region)
    for problem in problems_of(contract, region, case)[:3]:
        compared, difference = compare(*(executor.run(op, problem, case) for op in (interpreter, PlainLinear())))
        assert compared > 0 and difference is None, difference


class LateTile(RowParallel):
    """Right but in the last element of a result with many tiles."""

    implementation = "test.late_tile"

    def forward(self, region, inputs, host):
        (y,), saved = super().forward(region, inputs, host)
        if y.size > 1_000_000:
            y.reshape(-1).view(np.uint32)[-1] ^= 1
        return (y,), saved


def test_a_full_admission_is_a_chain_through_the_plain_kernel():
    budget = Budget("full", chained=1)
    contract = CONTRACTS["float32"]
    certificate = admit(
        operations()["down_proj"], "down_proj", "trainer_forward", contract, budget=budget, workers=WORKERS
    )
    ends = [(link.left, link.right) for link in certificate.links]
    assert ends == [
        ("interpreter", "cpu.gemm_leaves"), ("interpreter", "plain.fma_chain"), ("plain.fma_chain", "cpu.gemm_leaves"),
    ]  # fmt: skip
    assert certificate.outputs == certificate.links[2].outputs > 4_000_000 and "many tiles" in certificate.shape_classes
    late = LateTile(heads=False)
    admit(late, "down_proj", "trainer_forward", contract, workers=WORKERS)
    with pytest.raises(AdmissionRefused, match=r"1 of \d+ outputs differ .*too large for the interpreter"):
        admit(late, "down_proj", "trainer_forward", contract, budget=budget, workers=WORKERS)


class NeighbourNorm(RmsNorm):
    """The scale of the first row for every row: right alone, wrong in company."""

    implementation = "test.neighbour_norm"

    def forward(self, region, inputs, host):
        (y,), (x, scale) = super().forward(region, inputs, host)
        if len(x) > 1:
            weight = host.weights.vectors[region.weights[0]]
            with np.errstate(invalid="ignore"):
                y = np.ascontiguousarray(x * scale[:1, None] * weight)
        return (y,), (x, scale)


class DecodeOnly(SwiGlu):
    """Deviates in one case only."""

    implementation = "test.decode_only"

    def forward(self, region, inputs, host):
        (y,), saved = super().forward(region, inputs, host)
        if host.case == "rollout_decode" and y.size:
            y.reshape(-1).view(np.uint32)[-1] ^= 1
        return (y,), saved


class Shapeless(SwiGlu):
    """Fails for no rows."""

    implementation = "test.shapeless"

    def forward(self, region, inputs, host):
        if not len(inputs[0]):
            raise ValueError("cannot reshape an empty array")
        return super().forward(region, inputs, host)


class StrideBlind(SwiGlu):
    """Reads the memory behind a view as if it were contiguous."""

    implementation = "test.stride_blind"

    def forward(self, region, inputs, host):
        plain = []
        for x in inputs:
            base = x if x.flags.c_contiguous or x.base is None else x.base
            plain.append(np.ascontiguousarray(base.reshape(-1)[: x.size].reshape(x.shape)))
        return (activation.swiglu(*plain, host.workers, host.bf16),), tuple(plain)


class FlushesZeros(SwiGlu):
    """Turns -0 into +0: equal numbers, other bits."""

    implementation = "test.flushes_zeros"

    def forward(self, region, inputs, host):
        (y,), saved = super().forward(region, inputs, host)
        return (y + np.float32(0.0),), saved


def refusal(operation, region, case="trainer_forward", dtype="float32"):
    with pytest.raises(AdmissionRefused) as caught:
        admit(operation, region, case, CONTRACTS[dtype], workers=WORKERS)
    return caught.value


def test_a_row_that_depends_on_its_neighbours_is_refused():
    refused = refusal(NeighbourNorm(), "rms_norm")
    assert refused.report["explanation"]["point"] == "dependency"
    assert "may not depend" in str(refused) or "other rows" in str(refused)


def test_a_deviation_in_one_case_is_found_and_the_case_named():
    admit(DecodeOnly(), "swiglu", ("rollout_prefill", "trainer_forward"), CONTRACTS["float32"], workers=WORKERS)
    refused = refusal(DecodeOnly(), "swiglu", ("rollout_prefill", "rollout_decode"))
    assert refused.report["case"] == "rollout_decode"
    difference = refused.report["difference"]
    assert difference["differing"] == 1
    assert int(difference["expected"], 16) ^ int(difference["found"], 16) == 1


def test_a_failure_on_a_shape_of_the_contract_is_a_refusal_that_names_the_shape():
    refused = refusal(Shapeless(), "swiglu")
    assert "zero rows" in str(refused) and "cannot reshape an empty array" in str(refused)


def test_views_that_are_read_as_if_contiguous_are_refused():
    refused = refusal(StrideBlind(), "swiglu")
    assert "not contiguous" in refused.report["problem"]
    assert refused.report["explanation"]["point"] == "dependency"


def test_signed_zeros_count():
    refused = refusal(FlushesZeros(), "swiglu")
    assert (refused.report["difference"]["expected"], refused.report["difference"]["found"]) == (
        "0x80000000",
        "0x00000000",
    )


def test_unknown_targets_regions_and_cases_are_refused():
    contract = CONTRACTS["float32"]
    with pytest.raises(ContractError, match="for 'cpu' it can"):
        admit(SwiGlu(), "swiglu", "trainer_forward", contract, "sm_90")
    with pytest.raises(ContractError, match="no entry for region 'router'"):
        admit(SwiGlu(), "router", "trainer_forward", contract)
    with pytest.raises(ContractError, match="in case 'rollout'"):
        admit(SwiGlu(), "swiglu", "rollout", contract)


def test_bits_are_compared_as_integers_with_one_nan():
    nan, other = np.array([0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    compared, difference = compare({"y": np.array([nan, 0.0], np.float32)}, {"y": np.array([other, 0.0], np.float32)})
    assert (compared, difference) == (2, None)
    _, difference = compare({"y": np.array([0.0], np.float32)}, {"y": np.array([-0.0], np.float32)})
    assert difference is not None and difference.found == "0x80000000"
    for broken in ({}, {"y": np.zeros(3, np.float32)}, {"y": np.zeros(2)}):
        _, difference = compare({"y": np.zeros(2, np.float32)}, broken)
        assert difference is not None and difference.differing == 2


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.parametrize("bf16", [False, True])
def test_values_are_reproducible_and_on_the_grid(hazard, bf16):
    one, again, other = (make(hazard, generator(seed, hazard), (6, 40), bf16) for seed in (1, 1, 2))
    assert np.array_equal(one.view(np.uint32), again.view(np.uint32))
    assert not np.array_equal(pattern(one), pattern(other))
    assert not bf16 or not (one.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("region", ["rms_norm", "swiglu", "rope", "embedding", "o_proj", "logprob", "attention"])
@pytest.mark.parametrize("case", ["trainer_forward", "trainer_backward"])
def test_variations_fit_the_interpreter_and_nothing_changed_changes_nothing(region, case):
    contract = CONTRACTS["bfloat16"]
    executor = Executor(contract, WORKERS)
    problem = min(problems_of(contract, region, case)[:3], key=lambda p: p.inputs[0].size)
    want = executor.run(reference_operation(contract, region), problem, case)
    unchanged = varied_operation(contract, region, case, Variation("split", "nothing at all"))
    assert compare(want, executor.run(unchanged, problem, case))[1] is None
    seen = set()
    for variation in variations_for(region, case):
        if region == "rms_norm" or variation not in GENERIC:
            copy_interpreter(variation.edits)  # raises where a line or a function is no longer there
        seen.add(variation.point)
    assert seen >= set(POINTS) - {"dependency"}  # found by a probe, not by variations, in most regions


def test_a_variation_that_no_longer_fits_says_so():
    with pytest.raises(ContractError, match="it must stand there once"):
        copy_interpreter((Line("regions", "a line that is not there", ""),))
    with pytest.raises(ContractError, match="none of the six points"):
        Variation("speed", "something")


def test_the_product_s_interpreter_is_not_touched_by_variations():
    from rlkernel.reference import regions

    before = regions.ReferenceNorm._norm
    copies = copy_interpreter((Line("regions", "sqrt(add(mean, eps))", "add(sqrt(mean), eps)"),))
    assert regions.ReferenceNorm._norm is before
    assert copies["regions"].ReferenceNorm._norm is not before


def test_an_explanation_is_asked_of_a_deviation_that_is_none_of_those_known():
    class Halved(RmsNorm):
        implementation = "test.halved"

        def forward(self, region, inputs, host):
            (x,) = inputs
            weight = host.weights.vectors[region.weights[0]]
            y, scale = norm.rms_norm(x, weight, np.float32(host.config.rms_norm_eps), host.workers, host.bf16)
            return (y * np.float32(0.5),), (x, scale)

    refused = refusal(Halved(), "rms_norm")
    assert refused.report["explanation"]["point"] is None
    assert "no single change" in str(refused)


def test_a_dependency_that_rounding_hides_is_no_missing_and_no_extra_one():
    problem = problems_of(CONTRACTS["float32"], "rms_norm", "trainer_forward")[1]
    assert set(problem.hazards) == {"normal"} and problem.inputs[0].size < 3000

    def of(rule):
        return lambda p: {"y": rule(p.inputs[0])}

    alone = of(lambda x: x + np.float32(1.0))
    swallowed = of(lambda x: (x + np.float32(1.0)) + np.float32(0.0) * x[:1])  # row 0 enters, and leaves no trace
    seen = of(lambda x: (x + np.float32(1.0)) + np.float32(2.0**-10) * x[:1])
    assert dependency_difference(seen, swallowed, problem, False) is None
    assert dependency_difference(swallowed, seen, problem, False) is None
    found = dependency_difference(seen, alone, problem, False)
    assert found is not None and "changes with row 0 of input 0, on which it may not depend" in found
    found = dependency_difference(alone, seen, problem, False)
    assert found is not None and "does not change with row 0 of input 0, on which it has to depend" in found


class Changed(SwiGlu):
    """The portable operation, and what ``change`` does to its inputs and outputs."""

    def __init__(self, change):
        super().__init__()
        self._change = change

    def forward(self, region, inputs, host):
        outputs, saved = super().forward(region, inputs, host)
        return self._change(inputs, outputs), saved


def test_a_class_that_writes_to_its_inputs_is_refused():
    def overwrite(inputs, outputs):
        inputs[1][...] = 0
        return outputs

    with pytest.raises(AdmissionRefused, match="it writes to its input 1, which its caller needs as it was"):
        admit(Changed(overwrite), "swiglu", "trainer_forward", CONTRACTS["float32"], workers=WORKERS)


def test_a_class_that_gives_one_buffer_again_is_refused():
    buffer = np.empty(1 << 20, np.float32)

    def reuse(inputs, outputs):
        out = buffer[: outputs[0].size].reshape(outputs[0].shape)
        out[...] = outputs[0]
        return (out,)

    with pytest.raises(AdmissionRefused, match="a later call altered an earlier result"):
        admit(Changed(reuse), "swiglu", "trainer_forward", CONTRACTS["float32"], workers=WORKERS)


def test_a_class_that_ends_the_process_is_refused():
    def leave(inputs, outputs):
        raise SystemExit(0)

    with pytest.raises(AdmissionRefused, match="it raised SystemExit: 0, which is no Exception"):
        admit(Changed(leave), "swiglu", "trainer_forward", CONTRACTS["float32"], workers=WORKERS)


def test_an_interruption_of_the_user_s_is_no_failure_of_the_kernel():
    def interrupt(inputs, outputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        admit(Changed(interrupt), "swiglu", "trainer_forward", CONTRACTS["float32"], workers=WORKERS)
