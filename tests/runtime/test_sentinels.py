"""Sentinels: what ran has to be what was declared, in every step, before anything is published."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rlkernel.contract.build import build_contract
from rlkernel.contract.canonical import digest
from rlkernel.errors import ContractError
from rlkernel.ops.portable import Attention, RmsNorm
from rlkernel.verify.sentinels import Declaration, Duty, declare, missing, read_counts, undeclared
from tests.contract.test_contract import CONFIG
from tests.runtime.helpers import Commands, caught, clean
from tests.runtime.other_kernels import engine_runs, trainer_runs
from tests.runtime.plants import from_commit, on
from vime.runtime.assembly import Sides
from vime.types import GeneratedSample

# ------------------------------------------------------------------------------------------ nothing wrong


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("stages.train.activation_checkpointing=true", "stages.train.updates_per_step=2"),
        ("stages.rollout.sampling.max_new_tokens=1", "stages.rollout.max_batched_tokens=8"),
        ("numerics.trainer=native", "numerics.rollout=native", "on_mismatch=continue"),
    ],
)
def test_a_run_without_faults_passes_every_check(vime: Commands, overrides):
    ended = vime.run("stages.evaluate.prompts=2", *overrides)
    if "numerics.trainer=native" not in overrides:
        clean(ended)
    assert ended.error is None and ended.count("run_finished") == 1
    evidence = json.loads((ended.directory / "evidence.json").read_text())
    assert evidence["claims"]["facts"] == {
        "paged_kv at weight_commit": {"native-0": 3},
        "prefix_cache at weight_commit": {"native-0": 3},
        "topology at start": {"native-0": 1, "trainer": 1},
    }
    ran = {(call["case"], call["region"]) for call in evidence["trainer"]["calls"]}
    assert {("optimizer_step", region) for region in ("gradient_norm", "loss", "adamw")} <= ran
    contract = json.loads((ended.directory / "contract.json").read_text())
    for side, identities in contract["identities"].items():
        assert digest(contract["deployment"][side]) == identities["deployment"]
    assert set(contract["composition"]) == {"trainer", "native-0"}


def test_an_engine_in_another_process_passes_too(vime: Commands):
    ended = vime.run("placement=split", "stages.sync.transport=shm")
    clean(ended)
    evidence = json.loads((ended.directory / "evidence.json").read_text())
    assert evidence["claims"]["facts"]["prefix_cache at weight_commit"] == {"native-0": 3}


# ------------------------------------------------------------------------------------------ sentinels


class OtherNorm(RmsNorm):
    """The same bits, by a kernel that nobody declared."""

    implementation = "test.rms_norm"

    def backward(self, region: Any, saved: Any, grads: Any, host: Any) -> Any:
        """Also takes what a checked forward kept around the kernel's own values."""
        return super().backward(region, getattr(saved, "own", saved), grads, host)


class OtherAttention(Attention):
    """The same, for attention."""

    implementation = "test.attention"


def test_an_undeclared_kernel_is_refused_though_its_bits_are_equal(vime: Commands):
    ended = vime.run(plant=engine_runs("rms_norm", OtherNorm()))
    text = "step 0, rollout: engine native-0 ran 'test.rms_norm' "
    caught(ended, text, "as rms_norm in rollout_prefill; declared is 'cpu.rms_norm'", trained=0)
    ended = vime.run(plant=trainer_runs("attention", OtherAttention()))
    caught(ended, "step 0, score: the trainer ran 'test.attention'", "in trainer_score", trained=0)
    assert ended.count("step_compared") == 0


def test_an_undeclared_kernel_of_one_case_is_refused(vime: Commands):
    def plant(sides: Sides) -> None:
        model: Any = sides.trainer._model  # type: ignore[attr-defined]
        whole = model.backward

        def backward(*args: Any) -> None:
            own = model.composition
            trainer_runs("rms_norm", OtherNorm())(sides)
            whole(*args)
            model.composition = own

        model.backward = backward

    ended = vime.run(plant=plant)
    text = "step 0, train: the trainer ran 'test.rms_norm'"
    assert ended.code == 1 and text in ended.message and "as rms_norm in trainer_backward" in ended.message
    assert ended.count("version_published") == 1  # what was trained with it is not published


def test_an_undeclared_kernel_of_an_evaluation_is_refused(vime: Commands):
    def plant(sides: Sides) -> None:
        engine: Any = sides.engine.native  # type: ignore[attr-defined]
        whole = engine.generate

        def generate(requests: Any) -> Any:
            own = engine._model.composition
            if requests[0].sample_id.namespace == "eval":
                engine._model.composition = replace(own, ops={**own.ops, "rms_norm": OtherNorm()})
            yield from whole(requests)
            engine._model.composition = own

        engine.generate = generate

    ended = vime.run("stages.evaluate.prompts=2", plant=plant)
    caught(ended, "step 0, start: engine native-0 ran 'test.rms_norm'", trained=0)


def silent(sides: Sides, region: str, case: str) -> None:
    """A region that runs and is not counted, as if it had not run."""
    evidence: Any = sides.trainer._model.evidence  # type: ignore[attr-defined]
    whole = evidence.ran

    def ran(kind: str, in_case: str, *rest: Any) -> None:
        if (kind, in_case) != (region, case):
            whole(kind, in_case, *rest)

    evidence.ran = ran


@pytest.mark.parametrize(
    ("region", "case", "stage"),
    [
        ("logprob", "trainer_score", "score"),
        ("logprob", "trainer_forward", "train"),
        ("attention", "trainer_backward", "train"),
        ("logprob", "trainer_backward", "train"),
        ("swiglu", "trainer_recompute", "train"),
        ("gradient_norm", "optimizer_step", "train"),
        ("loss", "optimizer_step", "train"),
        ("adamw", "optimizer_step", "train"),
    ],
)
def test_a_declared_region_that_never_ran_fails_the_step(vime: Commands, region, case, stage):
    ended = vime.run("stages.train.activation_checkpointing=true", plant=lambda sides: silent(sides, region, case))
    text = f"step 0, {stage}: the trainer never ran {region} in {case}, which the contract declares"
    assert ended.code == 1 and text in ended.message
    assert ended.count("version_published") == 1


def test_samples_out_of_a_memory_are_refused(vime: Commands):
    """An engine that answers a repeated prompt with what it generated before, under the new version's name."""

    def plant(sides: Sides) -> None:
        engine: Any = sides.engine.native  # type: ignore[attr-defined]
        whole = engine.generate
        kept: list[GeneratedSample] = []

        def generate(requests: Any) -> Any:
            if not kept:
                kept.extend(whole(requests))
                yield from kept
                return
            for sample, request in zip(sorted(kept, key=lambda s: s.sample_id), requests, strict=True):
                versions = tuple(replace(run, version=1, kv_oldest=1, kv_newest=1) for run in sample.versions)
                prompt = request.prompt_token_ids
                yield replace(sample, sample_id=request.sample_id, prompt_token_ids=prompt, versions=versions)

        engine.generate = generate

    ended = vime.run(plant=plant)
    caught(ended, "step 1, rollout: engine native-0 ran nothing in rollout_prefill or rollout_decode", trained=1)


def test_evidence_that_cannot_be_read_or_goes_back_is_refused(vime: Commands):
    ended = vime.run(plant=on("trainer", "evidence", lambda e: {"facts": e["facts"]}))
    caught(ended, "the trainer: its evidence cannot be read (KeyError: 'calls'): nothing shows what ran", trained=0)

    def forgets(sides: Sides) -> None:
        evidence: Any = sides.trainer._model.evidence  # type: ignore[attr-defined]

        def clear(_: Sides) -> None:
            evidence.calls.clear()
            evidence.tokens.clear()

        from_commit(1, clear)(sides)

    caught(vime.run(plant=forgets), "step 1, start: the trainer: its evidence counts less than before", trained=1)


def test_every_occurrence_of_a_region_sees_every_token(vime: Commands):
    """One of two layers skips a norm: the kind ran, and the tokens say that it did not run everywhere."""

    def plant(sides: Sides) -> None:
        evidence: Any = sides.trainer._model.evidence  # type: ignore[attr-defined]
        whole, seen = evidence.ran, []

        def ran(kind: str, case: str, *rest: Any) -> None:
            if kind == "qk_norm" and case == "trainer_backward":
                seen.append(kind)
                if len(seen) == 2:
                    return
            whole(kind, case, *rest)

        evidence.ran = ran

    ended = vime.run(plant=plant)
    assert ended.code == 1
    assert "the trainer ran qk_norm in trainer_backward over " in ended.message and "2 in the model" in ended.message


def test_a_composition_that_lacks_a_region_cannot_be_declared():
    contract = build_contract(CONFIG)
    kinds = {region for _, region in contract.entries}
    whole = dict.fromkeys(kinds, "x")
    declare(contract, "e", ("rollout_decode",), whole, every_occurrence=True)
    del whole["rope"]
    with pytest.raises(ContractError, match="e has no implementation of rope in rollout_decode"):
        declare(contract, "e", ("rollout_decode",), whole, every_occurrence=True)


def test_duties_take_any_of_several_cases_but_each_of_them_whole():
    cases = ("rollout_prefill", "rollout_decode")
    declaration = Declaration("e", {(c, r): "x" for c in cases for r in ("rope", "swiglu", "logprob")})

    def counts(*ran: tuple[str, str]) -> Any:
        calls = [{"case": c, "region": r, "implementation": "x", "count": 1, "tokens": 4} for c, r in ran]
        return read_counts({"calls": calls})

    whole = [("rollout_decode", r) for r in ("rope", "swiglu", "logprob")]
    duty = [Duty(cases, 4)]
    assert not missing(declaration, counts(*whole), duty)
    assert not missing(declaration, counts(*whole, ("rollout_prefill", "rope"), ("rollout_prefill", "swiglu")), duty)
    assert missing(declaration, counts(*whole, ("rollout_prefill", "rope")), duty) == [
        "e never ran swiglu in rollout_prefill, which the contract declares"
    ]
    assert "4 rows in rollout_decode; 5 tokens" in missing(declaration, counts(*whole), [Duty(cases, 5)])[0]
    assert missing(declaration, counts(), duty) == [
        "e ran nothing in rollout_prefill or rollout_decode, which the step needs"
    ]
    assert undeclared(declaration, counts(("trainer_score", "rope"))) == [
        "e ran 'x' 1 times as rope in trainer_score; nothing is declared there"
    ]
