"""No key of the optimizer or of the loss is read and forgotten on its way to the trainer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline.helpers import loaded
from vime.pipeline.schema import Loss, Optimizer
from vime.runtime.assembly import trainer_config

BASE = ("steps=10", "stages.train.optimizer.schedule=linear")
OPTIMIZER = {
    "learning_rate": "2e-3",
    "betas": "[0.8, 0.9]",
    "eps": "1e-7",
    "weight_decay": "0.1",
    "schedule": "cosine",
    "warmup_updates": "2",
    "final_fraction": "0.5",
    "max_grad_norm": "0.5",
}
LOSS = {
    "kind": "reinforce",
    "clip_low": "0.1",
    "clip_high": "0.3",
    "normalise": "sequence_mean",
    "kl": "{coefficient: 0.1, estimator: k1, reference: initial}",
}


def config(*overrides: str) -> Any:
    """What the trainer is built with."""
    return trainer_config(loaded(*BASE, *overrides).pipeline)


def test_every_key_is_tried() -> None:
    assert set(OPTIMIZER) == set(Optimizer.model_fields)
    assert set(LOSS) == set(Loss.model_fields)


@pytest.mark.parametrize(("key", "value"), OPTIMIZER.items())
def test_a_key_of_the_optimizer_arrives(key: str, value: str) -> None:
    changed = config(f"stages.train.optimizer.{key}={value}").optimizer
    assert changed.as_json() != config().optimizer.as_json()


@pytest.mark.parametrize(("key", "value"), LOSS.items())
def test_a_key_of_the_loss_arrives(key: str, value: str) -> None:
    assert config(f"stages.train.loss.{key}={value}").loss != config().loss


def test_the_final_fraction_is_that_of_the_file() -> None:
    assert config("stages.train.optimizer.final_fraction=0.5").optimizer.schedule.learning_rate(10**6) == 0.5e-3
