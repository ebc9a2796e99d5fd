"""Another framework joins: a trainer on transformers and FSDP2 keeps the rules, and trains in the loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkernel.models.hf_config import config_json
from tests.adapters import fsdp2_trainer
from tests.adapters.fsdp2_trainer import FSDP2Trainer, declaration, local, process_group
from tests.adapters.native import CONTRACT, MODEL, tensors
from tests.runtime.helpers import prepared
from vime.adapters.conformance import TRAINER_RULES, TrainerHarness
from vime.errors import InvariantViolation
from vime.pipeline.prepare import Prepared
from vime.runtime import run_loop
from vime.runtime.assembly import Sides, assemble
from vime.store.run_directory import RunView
from vime.timeline.events import StepTrained

PUBLIC = {
    "rlkernel.contract.canonical",
    "rlkernel.contract.identity",
    "rlkernel.verify.evidence",
    "rlkernel.verify.sentinels",
    "vime.adapters",
    "vime.errors",
    "vime.train.interface",
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # token ids need no gradient
]
SMALL = replace(MODEL, num_layers=1)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with process_group(tmp_path_factory.mktemp("group")):
        yield
    torch.set_num_threads(threads)


def make() -> FSDP2Trainer:
    weights = {name: tensor for name, tensor in tensors(0).items() if name in SMALL.weight_shapes()}
    return FSDP2Trainer(config_json(SMALL, "float32"), weights, semantic=CONTRACT.identities({}).semantic)


def corrupt(trainer: FSDP2Trainer) -> None:
    local(next(trainer.model.parameters())).view(torch.int32).view(-1)[3] ^= 1


HARNESS = TrainerHarness(make=make, corrupt=corrupt, vocab_size=MODEL.vocab_size, declared=declaration(), exact=False)


@pytest.mark.parametrize("rule", TRAINER_RULES, ids=str)
def test_the_trainer_keeps_every_rule(rule):
    rule.verify(HARNESS)


def test_it_touches_no_internals():
    tree = ast.parse(Path(fsdp2_trainer.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in imported if name and name.partition(".")[0] in ("vime", "rlkernel", "hardware", "tests")}
    assert ours <= PUBLIC


def joined(ready: Prepared, directory: Path) -> Sides:
    """The embedded engine, and the other framework's trainer in place of the embedded one."""
    sides = assemble(ready, directory)
    trainer = FSDP2Trainer(
        config_json(ready.config, "float32"),
        sides.initial,
        semantic=sides.contract.identities({}).semantic,
        learning_rate=5e-3,
    )
    return replace(sides, trainer=trainer, declared={**sides.declared, "trainer": declaration()})


def test_it_trains_in_the_loop(tmp_path):
    ready = prepared(tmp_path / "run", "numerics.trainer=native", "on_mismatch=continue")
    outcome = run_loop.run(ready, sides=joined)
    assert outcome.steps == 2 and outcome.status == "mismatch"  # other arithmetic, and the reports say so
    for report in outcome.reports:
        assert report["compared_tokens"] == report["num_tokens"] > 0
        assert report["distribution_mismatch_count"] > 0
        assert 0 < report["max_abs_diff"] < 1e-4  # and the same function nevertheless
    events = [record.event for record in RunView.open(tmp_path / "run").records]
    digests = {event.weights_digest for event in events if isinstance(event, StepTrained)}
    assert len(digests) == 2
    checkpoints = sorted((tmp_path / "run/checkpoints").iterdir())
    assert checkpoints and (checkpoints[-1] / "exp_avg.safetensors").is_file()


def test_it_cannot_pass_for_exact(tmp_path):
    with pytest.raises(InvariantViolation, match=r"numerical_policy is [0-9a-f]{64} in the trainer"):
        run_loop.run(prepared(tmp_path / "run"), sides=joined)


def test_another_models_trainer_is_refused_even_where_mismatches_are_tolerated(tmp_path):
    def other(ready: Prepared, directory: Path) -> Sides:
        sides: Any = joined(ready, directory)
        sides.trainer._identities = replace(sides.trainer.identities(), semantic="0" * 64)
        return sides

    ready = prepared(tmp_path / "run", "numerics.trainer=native", "on_mismatch=continue")
    with pytest.raises(InvariantViolation, match=r"semantic is 0{64} in the trainer; the contract of this run has"):
        run_loop.run(ready, sides=other)
