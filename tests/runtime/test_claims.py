"""Identities and claims: each refuses what it is there for, in one sentence, at the start or at the commit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.errors import ContractError
from rlkernel.verify.claims import CHECKERS, START, WEIGHT_COMMIT, ClaimRegister, Moment
from tests.contract.test_contract import CONFIG
from tests.runtime.helpers import Commands, caught, clean
from tests.runtime.plants import facts, from_commit, on, without_fact
from vime.runtime.assembly import Sides

OTHER = "0" * 64


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
