"""Transports move exact bytes; a sync over them commits equal digests on all engines or rolls all back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sync.virtual import HeldEngine, Journal, digest_of, entries_of, weights_of
from vime.errors import InputError, InvariantViolation
from vime.rollout.interface import CommittedVersion
from vime.sync.coordinator import Coordinator, Publication
from vime.sync.drive import LocalChannel, drive
from vime.sync.participant import Participant
from vime.sync.transports import make_transport

TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).reshape(3, 5) / 7,
    "b": (torch.arange(7) * 0.1 - 0.3).to(torch.bfloat16),
    "nan": torch.tensor([float("nan"), -0.0, 1e-42, float("-inf")]),
    "empty": torch.zeros(0, 4),
}


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(params=["memory", "shm", "disk", "disk_delta"])
def transport(request, tmp_path):
    return make_transport(request.param, tmp_path / "weights")


def test_every_bit_name_shape_and_dtype_arrives(transport):
    handle = transport.send(TENSORS)
    received = transport.receive(handle)
    assert set(received) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert received[name].shape == tensor.shape and received[name].dtype == tensor.dtype
        assert raw(received[name]) == raw(tensor)
    transport.close_received()
    transport.release(handle)


def test_released_weights_cannot_be_received(tmp_path):
    for name in ("shm", "disk"):
        transport = make_transport(name, tmp_path / "weights")
        handle = transport.send(TENSORS)
        transport.release(handle)
        with pytest.raises(InvariantViolation):
            transport.receive(handle)


def test_other_names_and_dtypes_are_refused(tmp_path):
    with pytest.raises(InputError, match="memory, shm, disk"):
        make_transport("pigeon", tmp_path)
    with pytest.raises(InputError, match=r"x is torch\.int64"):
        make_transport("shm", tmp_path).send({"x": torch.zeros(2, dtype=torch.int64)})


def run(engines, transport, version=1):
    """Bring engines of this process from version 0 to ``version``; the outcome, and what the journal was told."""
    channels = {engine.name: LocalChannel(Participant(engine, transport)) for engine in engines}
    journal = Journal()
    coordinator = Coordinator([engine.name for engine in engines], journal)
    for number in (0, version):
        journal.events.clear()
        tensors = weights_of(number)
        handle = transport.send(tensors)
        entries = entries_of(tensors)
        coordinator.publish(0.0, Publication(number, digest_of(entries), handle, lambda kept=entries: kept))
        outcome = drive(coordinator, channels, clock=lambda: 0.0)
        transport.release(handle)
    return outcome, [event[:2] for event in journal.events]


def served(version):
    return version, digest_of(entries_of(weights_of(version)))


def test_all_engines_commit_after_all_have_verified(transport):
    engines = [HeldEngine("a"), HeldEngine("b")]
    outcome, told = run(engines, transport)
    assert outcome.committed == ("a", "b") and not outcome.reason
    assert told == [
        ("staged", "a"),
        ("verified", "a"),
        ("staged", "b"),
        ("verified", "b"),
        ("decided", "1"),
        ("committed", "a"),
        ("committed", "b"),
    ]
    assert [engine.token() for engine in engines] == [served(1)] * 2


class Damaging(HeldEngine):
    """Flips a bit of the last version that it stages, or says that it has committed it and serves on the one before."""

    def __init__(self, name, *, flips=False, lies=False):
        super().__init__(name)
        self.flips, self.lies = flips, lies

    def stage_weights(self, version, tensors):
        if version and self.flips:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            tensors["norm"].view(torch.int32)[0, 0] ^= 1
        return super().stage_weights(version, tensors)

    def commit_weights(self, version, digest):
        if version and self.lies:
            return CommittedVersion(version, digest)
        return super().commit_weights(version, digest)


def test_one_flipped_bit_in_one_engine_rolls_all_back(transport):
    engines = [HeldEngine("a"), Damaging("b", flips=True), HeldEngine("c")]
    outcome, told = run(engines, transport)
    assert outcome.rolled_back and outcome.error == "InvariantViolation"
    assert outcome.reason.startswith("engine b staged version 1 with digest")
    assert outcome.reason.endswith("the bytes of tensor norm are others")
    assert ("committed", "a") not in told and ("rolled_back", "b") in told
    assert [engine.token() for engine in engines] == [served(0)] * 3
    assert all(engine.slots._staged is None for engine in engines)


def test_an_engine_that_claims_a_commit_without_serving_it_is_caught(transport):
    with pytest.raises(InvariantViolation, match="engine b serves version 0"):
        run([HeldEngine("a"), Damaging("b", lies=True)], transport)


def test_shared_memory_leaves_nothing_behind(tmp_path):
    from multiprocessing import shared_memory

    transport = make_transport("shm", tmp_path)
    handle = transport.send(TENSORS)
    transport.receive(handle)
    transport.close_received()
    transport.release(handle)
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=handle["segment"])
    assert np.prod(TENSORS["a"].shape) == 15
