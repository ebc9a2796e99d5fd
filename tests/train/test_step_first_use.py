"""The first optimizer step of a process is confirmed on live operands: whatever admission had compared before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import vime.train.native.optimizer as optimizer_module
from rlkernel.contract.build import build_contract
from rlkernel.contract.schedules import Schedule
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.first_use_step import APART, StepFirstUse, places
from rlkernel.verify.evidence import Evidence
from tests.ops.helpers import config
from vime.train.native.optimizer import AdamW, OptimizerConfig

CONTRACT = build_contract(config())
GRAIN = 8192
RNG = np.random.default_rng(6)
SHAPES = {"a": (3, GRAIN), "b": (5,), "c": (40, 1000), "empty": (0, 4)}


def arrays(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def updated(dtype: Any = "float32") -> tuple[AdamW, Evidence]:
    """An optimizer after its first update, confirmed."""
    evidence = Evidence("trainer")
    weights = {name: torch.from_numpy(x).to(getattr(torch, dtype)) for name, x in arrays(1).items()}
    subject = AdamW(OptimizerConfig(Schedule(1e-2), weight_decay=0.1), weights, dtype, Workers(2), evidence)
    subject.first_use = StepFirstUse(build_contract(config(), dtype=dtype), evidence)
    subject.update(arrays(2))
    return subject, evidence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_is_confirmed_once_and_no_bit_changes(dtype: str) -> None:
    subject, evidence = updated(dtype)
    facts = evidence.facts["first_use"]
    sampled = sum(len(places(int(np.prod(shape)))) for shape in SHAPES.values())
    assert facts["optimizer_step/adamw"] == {"calls": 1, "outputs": 4 * sampled, "differing": 0}
    assert facts["optimizer_step/gradient_norm"] == {"calls": 1, "outputs": 2, "differing": 0}
    subject.update(arrays(3))
    assert facts["optimizer_step/adamw"]["calls"] == 1
    weights = {name: torch.from_numpy(x).to(getattr(torch, dtype)) for name, x in arrays(1).items()}
    plain = AdamW(OptimizerConfig(Schedule(1e-2), weight_decay=0.1), weights, dtype, Workers(2))
    plain.update(arrays(2))
    plain.update(arrays(3))
    for name, value in plain.state().master.items():
        assert value.tobytes() == subject.state().master[name].tobytes()


def test_every_share_of_a_thread_holds_a_place() -> None:
    assert GRAIN // 4 > APART
    found = places(10 * GRAIN + 3)
    assert set((found // (GRAIN // 4)).tolist()) == set(range(-(-(10 * GRAIN + 3) // (GRAIN // 4))))
    assert found[-1] == 10 * GRAIN + 2 and len(places(0)) == 0 and places(1).tolist() == [0]


def test_a_kernel_that_is_wrong_from_the_second_share_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = optimizer_module.adamw

    def wrong(master: Any, m: Any, v: Any, gradient: Any, *rest: Any) -> Any:
        doubled = gradient.copy()
        doubled.reshape(-1)[GRAIN:] *= 2
        return right(master, m, v, doubled, *rest)

    monkeypatch.setattr(optimizer_module, "adamw", wrong)
    with pytest.raises(NumericsError, match=r"adamw \(optimizer_step\): element \d+ of master of a is 0x") as error:
        updated()
    assert "outputs of the first use differ on live operands" in str(error.value)


def test_a_norm_of_some_leaves_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = optimizer_module.gradient_norm

    def wrong(gradients: Any, workers: Any) -> Any:
        return right({name: x.reshape(-1)[:16384] for name, x in gradients.items()}, workers)

    monkeypatch.setattr(optimizer_module, "gradient_norm", wrong)
    with pytest.raises(NumericsError, match=r"gradient_norm \(optimizer_step\): element 0 of norm is 0x"):
        updated()
