"""Transports move exact bytes; the transaction commits equal digests on all engines or rolls all back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vime.errors import InputError, InvariantViolation
from vime.rollout.interface import CommittedVersion
from vime.sync.transaction import LocalTarget, synchronise
from vime.sync.transport import make_transport

TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).reshape(3, 5) / 7,
    "b": (torch.arange(7) * 0.1 - 0.3).to(torch.bfloat16),
    "nan": torch.tensor([float("nan"), -0.0, 1e-42, float("-inf")]),
    "empty": torch.zeros(0, 4),
}


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(params=["memory", "shm", "disk"])
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


class Engine:
    """Serves bytes; can be told to damage what it stages or to commit something else."""

    def __init__(self, name, damage=False, lie=False):
        self.engine_id, self.damage, self.lie = name, damage, lie
        self.served = CommittedVersion(0, "old")
        self.staged = None

    def stage_weights(self, version, tensors):
        content = b"".join(raw(tensors[n]) for n in sorted(tensors))
        self.staged = (version, content[:-1] + bytes([content[-1] ^ self.damage]))
        return self.staged[1].hex()

    def commit_weights(self, version, digest):
        assert self.staged is not None
        committed = CommittedVersion(version, self.staged[1].hex())
        if not self.lie:
            self.served = committed
        self.staged = None
        return self.served

    def rollback_weights(self):
        self.staged = None


PUBLISHED = b"".join(raw(TENSORS[n]) for n in sorted(TENSORS)).hex()


def run(engines, transport):
    records = []
    targets = [LocalTarget(engine, transport) for engine in engines]
    try:
        synchronise(1, PUBLISHED, TENSORS, targets, transport, records.append)
    finally:
        kinds = [(record.kind, record.engine_id) for record in records]
        run.kinds = kinds
    return kinds


def test_all_engines_commit_after_all_have_verified(transport):
    engines = [Engine("a"), Engine("b")]
    assert run(engines, transport) == [
        ("staged", "a"),
        ("verified", "a"),
        ("staged", "b"),
        ("verified", "b"),
        ("committed", "a"),
        ("committed", "b"),
    ]
    assert all(engine.served == CommittedVersion(1, PUBLISHED) for engine in engines)


def test_one_flipped_bit_in_one_engine_rolls_all_back(transport):
    engines = [Engine("a"), Engine("b", damage=True), Engine("c")]
    with pytest.raises(InvariantViolation, match="engine b staged version 1 with digest"):
        run(engines, transport)
    assert ("committed", "a") not in run.kinds
    assert run.kinds[-2:] == [("rolled_back", "a"), ("rolled_back", "b")]
    assert all(engine.served == CommittedVersion(0, "old") and engine.staged is None for engine in engines)


def test_an_engine_that_claims_a_commit_without_serving_it_is_caught(transport):
    with pytest.raises(InvariantViolation, match="engine b serves version 0"):
        run([Engine("a"), Engine("b", lie=True)], transport)


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
