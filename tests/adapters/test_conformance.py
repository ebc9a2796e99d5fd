"""The embedded sides keep every rule, and for every rule there is an adapter that breaks it and is told so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.adapters.broken_engines import BROKEN_ENGINES
from tests.adapters.broken_trainers import BROKEN_TRAINERS, Plant, forgets_degrees
from tests.adapters.native import ENGINE, TRAINER, make_engine, make_trainer
from vime.adapters.conformance import (
    ENGINE_RULES,
    EXACT_ENGINE_RULES,
    EXACT_TRAINER_RULES,
    TRAINER_RULES,
    ConformanceError,
    check_engine,
    check_trainer,
)
from vime.errors import InputError

ALL_TRAINER_RULES, ALL_ENGINE_RULES = TRAINER_RULES + EXACT_TRAINER_RULES, ENGINE_RULES + EXACT_ENGINE_RULES
SETTINGS: list[dict[str, Any]] = [
    {},
    {"activation_checkpointing": True, "updates_per_step": 3, "micro_batch_samples": 1},
]


@pytest.mark.parametrize("rule", ALL_TRAINER_RULES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "several updates"])
def test_the_embedded_trainer_keeps_every_rule(rule, settings):
    rule.verify(replace(TRAINER, make=lambda: make_trainer(**settings), checkpointing=bool(settings)))


@pytest.mark.parametrize("rule", ALL_ENGINE_RULES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"prefix_caching": False, "max_num_seqs": 2}], ids=["cached", "uncached"])
def test_the_embedded_engine_keeps_every_rule(rule, settings):
    rule.verify(replace(ENGINE, make=lambda: make_engine(**settings)))


def test_reports_name_every_broken_rule():
    check_trainer(TRAINER).require()
    check_engine(ENGINE).require()
    broken = check_trainer(replace(TRAINER, make=lambda: planted(make_trainer(), forgets_degrees)))
    assert [outcome.rule.name for outcome in broken.broken] == ["evidence"]
    with pytest.raises(ConformanceError, match=r"1 of 16 rules are broken:\nevidence \(.*has no fact degrees"):
        broken.require()


def test_a_vocabulary_that_is_too_large_for_the_suite_is_refused():
    with pytest.raises(InputError, match="a vocabulary of 5000 tokens"):
        replace(TRAINER, vocab_size=5000)


def planted(adapter: Any, plant: Plant) -> Any:
    plant(adapter)
    return adapter


@pytest.mark.parametrize(("name", "plant", "text"), BROKEN_TRAINERS)
def test_a_trainer_that_breaks_a_rule_is_told_which(name, plant, text):
    (rule,) = (rule for rule in ALL_TRAINER_RULES if rule.name == name)
    problem = rule.problem(replace(TRAINER, make=lambda: planted(make_trainer(), plant)))
    assert problem is not None and text in problem
    with pytest.raises(ConformanceError, match=f"{name} \\("):
        rule.verify(replace(TRAINER, make=lambda: planted(make_trainer(), plant)))


def test_every_rule_is_broken_once():
    assert {name for name, _, _ in BROKEN_TRAINERS} == {rule.name for rule in ALL_TRAINER_RULES}
    assert {name for name, _, _ in BROKEN_ENGINES} == {rule.name for rule in ALL_ENGINE_RULES}


@pytest.mark.parametrize(("name", "plant", "text"), BROKEN_ENGINES)
def test_an_engine_that_breaks_a_rule_is_told_which(name, plant, text):
    (rule,) = (rule for rule in ALL_ENGINE_RULES if rule.name == name)
    problem = rule.problem(replace(ENGINE, make=lambda: planted(make_engine(), plant)))
    assert problem is not None and text in problem
