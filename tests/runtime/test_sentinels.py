"""Identities, claims and sentinels: each refuses what it is there for, in one sentence, before it is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlkernel.contract.build import build_contract
from rlkernel.contract.canonical import digest
from rlkernel.contract.claims import Topology
from rlkernel.errors import ContractError
from rlkernel.ops.portable import Attention, RmsNorm
from rlkernel.verify.claims import CHECKERS, START, WEIGHT_COMMIT, ClaimRegister, Moment
from rlkernel.verify.sentinels import Declaration, Duty, declare, missing, read_counts, undeclared
from tests.contract.test_contract import CONFIG
from tests.runtime.helpers import Commands, caught, clean
from tests.runtime.other_kernels import engine_runs, trainer_runs
from vime.runtime.assembly import Sides
from vime.types import GeneratedSample

Plant = Callable[[Sides], None]
OTHER = "0" * 64


def on(side: str, name: str, change: Callable[[Any], Any]) -> Plant:
    """Change what a method of one side returns."""

    def plant(sides: Sides) -> None:
        owner: Any = sides.trainer if side == "trainer" else sides.engine.native  # type: ignore[attr-defined]
        whole = getattr(owner, name)
        setattr(owner, name, lambda *args: change(whole(*args)))

    return plant


def from_commit(version: int, plant: Plant) -> Plant:
    """The fault begins when a version has been committed."""

    def later(sides: Sides) -> None:
        engine: Any = sides.engine.native  # type: ignore[attr-defined]
        whole = engine.commit_weights

        def commit(number: int, weights: str) -> Any:
            result = whole(number, weights)
            if number == version:
                plant(sides)
            return result

        engine.commit_weights = commit

    return later


def facts(**changes: Any) -> Callable[[Any], Any]:
    return lambda evidence: {**evidence, "facts": {**evidence["facts"], **changes}}


def without_fact(name: str) -> Callable[[Any], Any]:
    return lambda evidence: {**evidence, "facts": {k: v for k, v in evidence["facts"].items() if k != name}}


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


# ------------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("name", ["semantic", "numerical_policy"])
def test_another_identity_on_one_side_is_refused(vime: Commands, side, name):
    ended = vime.run(plant=on(side, "identities", lambda found: replace(found, **{name: OTHER})))
    who = "the trainer" if side == "trainer" else "engine native-0"
    caught_at_start(ended, "do not compute the same function", f"{name} is {OTHER} in {who}")


def caught_at_start(ended: Any, *texts: str) -> None:
    """Refused before anything was published; there is no log of a run that never began."""
    assert ended.code == 1
    for text in texts:
        assert text in ended.message
    assert ended.count("version_published") == 0


def test_a_wrong_identity_that_both_sides_share_is_refused(vime: Commands):
    def plant(sides: Sides) -> None:
        for side in ("trainer", "engine"):
            on(side, "identities", lambda found: replace(found, numerical_policy=OTHER))(sides)

    caught_at_start(vime.run(plant=plant), "in the trainer", "in engine native-0", "the contract of this run has")


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("name", ["semantic", "numerical_policy", "deployment"])
@pytest.mark.parametrize("value", ["", "sha256"])
def test_a_missing_identity_is_a_refusal(vime: Commands, side, name, value):
    def blank(found: Any) -> Any:
        other = replace(found)
        object.__setattr__(other, name, value)
        return other

    caught_at_start(vime.run(plant=on(side, "identities", blank)), f"identity {name} is {value!r}")


def test_a_side_without_identities_is_refused(vime: Commands):
    caught_at_start(vime.run(plant=on("engine", "identities", lambda _: None)), "engine native-0 shows None in place")


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_deployment_that_changes_under_the_run_is_refused_at_the_next_commit(vime: Commands, side):
    plant = from_commit(0, on(side, "identities", lambda found: replace(found, deployment=OTHER)))
    who = "the trainer" if side == "trainer" else "engine native-0"
    ended = vime.run(plant=plant)
    caught(ended, f"step 0, sync: the deployment identity of {who} changed under the run", trained=1)
    assert ended.count("sync_committed") == 1


def test_deployments_may_differ_between_sides(vime: Commands):
    clean(vime.run(plant=on("engine", "identities", lambda found: replace(found, deployment=OTHER))))


def test_another_model_is_refused_where_numerics_differ_anyway(vime: Commands):
    plant = on("trainer", "identities", lambda found: replace(found, semantic=OTHER))
    caught_at_start(vime.run("numerics.trainer=native", "on_mismatch=continue", plant=plant), "semantic is")


# ------------------------------------------------------------------------------------------ claims


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_degree_outside_the_claim_is_refused(vime: Commands, side):
    plant = on(side, "evidence", facts(degrees=Topology(tp=2).as_json()))
    who = "trainer" if side == "trainer" else "native-0"
    caught_at_start(vime.run(plant=plant), f"{who} breaks the claim topology at the start: tp = 2 is outside the claim")
    clean(vime.run("contract.topology={tp: 2}", plant=plant), steps=2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_fact("degrees"), "could not be checked at the start: its evidence has no fact 'degrees'"),
        (facts(degrees={"tp": 1}), "missing fields"),
        (facts(degrees={**Topology().as_json(), "tp": 0}), "each is 1 or more"),
    ],
)
def test_degrees_that_are_not_shown_are_refused(vime: Commands, change, text):
    caught_at_start(vime.run(plant=on("engine", "evidence", change)), "the claim topology", text)


def keeps_cache(sides: Sides) -> None:
    """A commit that invalidates nothing."""
    sides.engine.native.blocks.invalidate = lambda: 0  # type: ignore[attr-defined]


def test_a_cache_kept_across_a_commit_is_refused(vime: Commands):
    ended = vime.run(plant=keeps_cache)
    text = "step 0, sync: native-0 breaks the claim prefix_cache at the weight_commit of version 1: "
    caught(ended, text, "cached blocks were kept, written by weight versions [0]", trained=1)


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (facts(cached_versions=[0]), "breaks the claim prefix_cache"),
        (facts(blocks_invalidated=0), "blocks were cached and 0 were invalidated"),
        (facts(kv_versions=[0]), "breaks the claim paged_kv"),
        (without_fact("kv_versions"), "the claim paged_kv of native-0 could not be checked"),
        (without_fact("blocks_invalidated"), "the claim prefix_cache of native-0 could not be checked"),
    ],
)
def test_what_a_commit_has_to_invalidate_is_checked_by_facts(vime: Commands, plant, text):
    ended = vime.run(plant=from_commit(0, on("engine", "evidence", plant)))
    assert ended.code == 1 and text in ended.message


def test_a_check_that_did_not_run_is_a_violation(vime: Commands):
    def plant(sides: Sides) -> None:
        sides.claims.check = lambda *args: []  # type: ignore[method-assign]

    caught_at_start(vime.run(plant=plant), "the claim topology of trainer was not checked at the start", "violation")

    def forgetful(sides: Sides) -> None:
        whole, register = sides.claims.check, sides.claims

        def check(moment: Moment, *args: Any) -> list[str]:
            if moment.kind != WEIGHT_COMMIT or moment.version != 1:
                return whole(moment, *args)
            return []

        register.check = check  # type: ignore[method-assign]

    ended = vime.run(plant=forgetful)
    caught(ended, "the claim paged_kv of native-0 was not checked at the weight_commit of version 1", trained=1)


def test_a_commit_that_nobody_checked_is_found_at_the_end(vime: Commands):
    """Even where the call itself was lost: what is due comes from the commits, not from the checks."""

    def plant(sides: Sides) -> None:
        whole, register = sides.claims.check, sides.claims

        def check(moment: Moment, *args: Any) -> list[str]:
            found = whole(moment, *args)
            if moment.version == 2:
                for key in [key for key in register.ran if key[1].version == 0]:
                    del register.ran[key]
            return found

        register.check = check  # type: ignore[method-assign]

    ended = vime.run(plant=plant)
    caught(ended, "was not checked at the weight_commit of version 0", trained=2)


def test_a_claim_without_a_checker_is_an_error(vime: Commands):
    contract = _contract()
    ClaimRegister(contract)
    for name in CHECKERS:
        with pytest.raises(ContractError, match=f"the claims {name} have no checker"):
            ClaimRegister(contract, {key: value for key, value in CHECKERS.items() if key != name})


def test_states_are_due_at_every_event_that_invalidates_them():
    register = ClaimRegister(_contract())
    assert register.due(Moment(START), "trainer") == ("topology",)
    for kind in (WEIGHT_COMMIT, "sleep"):
        assert register.due(Moment(kind, 3), "engine") == ("paged_kv", "prefix_cache")
    assert register.due(Moment(WEIGHT_COMMIT, 3), "trainer") == ()


def test_samples_that_go_on_over_a_commit_are_allowed_only_where_the_engine_says_so():
    empty = {"blocks_cached": 0, "blocks_invalidated": 0, "cached_versions": [], "kv_versions": [1, 2]}
    for policy, broken in (("refuse", 1), ("recompute", 1), ("continue", 0)):
        shown = {**empty, "in_flight_updates": policy}
        found = ClaimRegister(_contract()).check(Moment(WEIGHT_COMMIT, 2), "e", "engine", shown, shown)
        assert len(found) == broken


def _contract() -> Any:
    return build_contract(CONFIG)


# ------------------------------------------------------------------------------------------ sentinels


class OtherNorm(RmsNorm):
    """The same bits, by a kernel that nobody declared."""

    implementation = "test.rms_norm"


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
    contract = _contract()
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
