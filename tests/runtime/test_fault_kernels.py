"""Kernels of another order, contract or arithmetic on one side: caught, and the region named."""

from __future__ import annotations

import ctypes
import json
import platform
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import vime.train.native.optimizer as optimizer_module
import vime.train.native.trainer as trainer_module
from rlkernel.kernels.cpu.primitives import rounds_to_nearest_even
from tests.runtime import faults, other_kernels
from tests.runtime.helpers import caught, clean, reward
from vime.errors import InvariantViolation
from vime.runtime import assembly
from vime.timeline.events import StepCompared

KERNELS = {
    "qkv_proj": other_kernels.ReversedColumns(heads=True),
    "gate_up_proj": other_kernels.ReversedColumns(heads=False),
    "o_proj": other_kernels.ReversedRows(heads=True),
    "down_proj": other_kernels.ReversedRows(heads=False),
    "attention": other_kernels.ReversedAttention(),
    "rms_norm": other_kernels.RotatedNorm(),
    "logprob": other_kernels.ReversedHead(),
}
NAMES = {"rms_norm": "layers.0.attention_norm", "logprob": "logprob (logits)"}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_swapped_reduction_order_is_caught_and_its_region_named(vime, kind):
    for side in (other_kernels.engine_runs, other_kernels.trainer_runs):
        ended = vime.run(plant=side(kind, KERNELS[kind]))
        name = NAMES.get(kind, f"layers.0.{kind}")
        caught(ended, "step 0, compare: ", f"the first differing boundary is {name}", trained=0)
        (compared,) = (event for event in ended.events if isinstance(event, StepCompared))
        assert compared.distribution_mismatch_count > 0
        assert compared.metrics["diagnosis"]["boundary"]["differing"] > 0


@pytest.mark.parametrize(
    ("setting", "kind", "name"),
    [
        # in bfloat16 most differences of an order are rounded away, and then nothing differs; logits are never rounded
        ("contract.dtype=bfloat16", "logprob", "logprob (logits)"),
        ("contract.topology.tp=2", "down_proj", "layers.0.down_proj"),
    ],
)
def test_other_contracts_notice_a_swapped_order_too(vime, setting, kind, name):
    ended = vime.run(setting, plant=other_kernels.engine_runs(kind, KERNELS[kind]))
    caught(ended, "step 0, compare: ", f"the first differing boundary is {name}", trained=0)


def test_a_kernel_that_differs_in_one_case_only_is_caught(vime):
    decode = other_kernels.ReversedColumns(True, ("rollout_decode",))
    ended = vime.run(plant=other_kernels.engine_runs("qkv_proj", decode))
    caught(ended, "step 0, compare: ", "the rollout's array that it does not reproduce", trained=0)
    training = other_kernels.ReversedColumns(True, ("trainer_forward",))
    ended = vime.run(plant=other_kernels.trainer_runs("qkv_proj", training))
    caught(ended, "step 0, train: the training forward of sample train/", "scoring forward", trained=0)
    recompute = other_kernels.ReversedColumns(True, ("trainer_recompute",))
    ended = vime.run(
        "stages.train.activation_checkpointing=true", plant=other_kernels.trainer_runs("qkv_proj", recompute)
    )
    caught(ended, "step 0, train: layer 1: the recomputed output", trained=0)


def test_log_probabilities_without_the_temperature_are_caught(vime):
    ended = vime.run(
        "stages.rollout.sampling.temperature=0.7", plant=other_kernels.engine_runs("logprob", other_kernels.RawHead())
    )
    caught(ended, "step 0, compare: ", "the first differing boundary is logprob (logits)", trained=0)
    clean(vime.run("stages.rollout.sampling.temperature=0.7"))


def test_a_tolerated_mismatch_is_in_every_report(vime):
    plant = other_kernels.engine_runs("o_proj", KERNELS["o_proj"])
    ended = vime.run("on_mismatch=continue", plant=plant)
    assert ended.code == 1 and ended.error is None and ended.count("run_finished") == 1
    assert "differ between rollout and trainer" in ended.message
    for report in ended.reports:
        assert report["distribution_mismatch_count"] > 0
        boundary = report["diagnosis"]["boundary"]
        assert (boundary["region"], boundary["layer"]) == ("layers.0.o_proj", 0)
        assert report["worst_token"]["sample"] == report["diagnosis"]["sample"]
    assert sum(report["mismatch_count"] for report in ended.reports) > 0
    written = [json.loads(line) for line in (ended.directory / "steps.jsonl").read_text().splitlines()]
    assert written == json.loads(json.dumps(ended.reports))
    code, printed = vime.call("report", str(ended.directory))
    assert code == 1 and "the first differing boundary is layers.0.o_proj" in " ".join(printed.replace("│", "").split())
    code, printed = vime.call("report", str(ended.directory), "--json")
    assert code == 1 and json.loads(printed.splitlines()[0])["mismatch_count"] is not None
    code, _ = vime.call("resume", str(ended.directory))  # finished: reported again
    assert code == 1


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_native_kernels_on_one_side_are_measured(vime, side):
    ended = vime.run(f"numerics.{side}=native", "on_mismatch=continue", "steps=1")
    assert ended.code == 1 and ended.count("run_finished") == 1
    (report,) = ended.reports
    assert report["mismatch_count"] > 0 and report["distribution_mismatch_count"] > 0
    assert 0 < report["max_abs_diff"] < 1e-3
    assert report["diagnosis"]["boundary"]["region"].startswith("layers.0.")
    clean(vime.run("on_mismatch=continue", "steps=1"), steps=1)


SPLIT = ("placement=split", "stages.sync.transport=shm", "threads=2")


def test_the_kernel_of_an_engine_in_another_process_is_named_too(vime, monkeypatch):
    monkeypatch.setattr(assembly, "build_engine_in_child", other_kernels.build_reversed_engine)
    ended = vime.run(*SPLIT)
    caught(ended, "step 0, compare: ", "the first differing boundary is layers.0.down_proj", trained=0)


def test_sides_of_other_contracts_do_not_start(vime):
    def plant(sides):
        engine = sides.engine.native
        engine._identities = replace(engine._identities, numerical_policy="0" * 64)

    ended = vime.run(plant=plant)
    assert ended.code == 1 and isinstance(ended.error, InvariantViolation)
    assert "do not compute the same function" in ended.message and "numerical_policy" in ended.message
    assert ended.count("version_published") == 0


# ------------------------------------------------------------------------------------------ subnormals


def flushing_reward(prompt: Any, sample: Any, text: str) -> float:
    """A user's function that switches subnormals off for the thread that calls it."""
    if prompt.prompt_index >= 2:
        torch.set_flush_denormal(True)
    return reward(prompt, sample, text)


def test_subnormals_flushed_in_one_worker_thread_are_caught(vime):
    ended = vime.run("threads=2", plant=faults.flush_in_worker)
    caught(ended, "step 0: 1 of 1 worker threads flush subnormal numbers to zero", trained=0)


def test_subnormals_flushed_by_a_reward_are_caught_in_the_same_step(vime, intact_subnormals):
    ended = vime.run("stages.reward.function=tests.runtime.test_fault_kernels.flushing_reward")
    caught(ended, "step 1, score: this thread flushes subnormal numbers to zero", trained=1)


def rounding_up_reward(prompt: Any, sample: Any, text: str) -> float:
    """A user's function that leaves another rounding mode behind."""
    if prompt.prompt_index >= 2:
        ctypes.CDLL(None).fesetround(FE_UPWARD)
    return reward(prompt, sample, text)


FE_TONEAREST, FE_UPWARD = 0, 0x800  # of x86-64


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the constant is of x86-64")
def test_another_rounding_mode_is_caught_in_the_same_step(vime):
    try:
        ended = vime.run("stages.reward.function=tests.runtime.test_fault_kernels.rounding_up_reward")
    finally:
        ctypes.CDLL(None).fesetround(FE_TONEAREST)
    caught(ended, "step 1, score: this thread does not round to nearest even", trained=1)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the constants are of x86-64")
@pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00])
def test_every_other_rounding_mode_is_seen(mode):
    assert rounds_to_nearest_even()
    try:
        ctypes.CDLL(None).fesetround(mode)
        assert not rounds_to_nearest_even()
    finally:
        ctypes.CDLL(None).fesetround(FE_TONEAREST)
    assert rounds_to_nearest_even()


def test_subnormals_flushed_during_generation_are_caught(vime, intact_subnormals):
    ended = vime.run(plant=faults.flush_while_generating)
    caught(ended, "step 0, rollout: this thread flushes subnormal numbers to zero", trained=0)


def test_subnormals_flushed_in_a_thread_of_another_process_are_caught(vime, monkeypatch):
    monkeypatch.setattr(assembly, "build_engine_in_child", faults.build_flushing_engine)
    ended = vime.run(*SPLIT)
    caught(ended, "step 0, rollout: engine native-0: 1 of 1 worker threads flush subnormal numbers", trained=0)


def test_a_swapped_optimizer_or_loss_stops_a_run(vime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adamw, losses = optimizer_module.adamw, trainer_module.token_losses

    def late(master: Any, *rest: Any) -> Any:
        found = adamw(master, *rest)
        master.reshape(-1)[-1] = np.nextafter(master.reshape(-1)[-1], np.float32(np.inf))
        return found

    def other(*given: Any) -> Any:
        found = losses(*given)
        trained = np.flatnonzero(found.coefficient)
        found.coefficient[trained[-1:]] *= np.float32(1.0000001)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(optimizer_module, "adamw", late)
        caught(vime.run(), "adamw (optimizer_step): element ", "on live operands", trained=0)
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "token_losses", other)
        caught(vime.run(), "loss (optimizer_step): element ", "of coefficient is 0x", trained=0)
    clean(vime.run())
