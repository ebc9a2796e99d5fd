"""The rules that every trainer and engine keeps, as checks that run on the real thing.

In a test of your own adapter::

    from vime.adapters.conformance import TRAINER_RULES, TrainerHarness, check_trainer

    check_trainer(harness).require()                      # all rules at once, one sentence each

    @pytest.mark.parametrize("rule", TRAINER_RULES, ids=str)
    def test_rule(rule):                                  # or one test a rule
        rule.verify(harness)
"""

from vime.adapters.conformance.engine_rules import ENGINE_RULES, EXACT_ENGINE_RULES, check_engine
from vime.adapters.conformance.harness import EngineHarness, TrainerHarness
from vime.adapters.conformance.rules import Broken, ConformanceError, ConformanceReport, Outcome, Rule
from vime.adapters.conformance.trainer_rules import EXACT_TRAINER_RULES, TRAINER_RULES, check_trainer

__all__ = [
    "ENGINE_RULES",
    "EXACT_ENGINE_RULES",
    "EXACT_TRAINER_RULES",
    "TRAINER_RULES",
    "Broken",
    "ConformanceError",
    "ConformanceReport",
    "EngineHarness",
    "Outcome",
    "Rule",
    "TrainerHarness",
    "check_engine",
    "check_trainer",
]
