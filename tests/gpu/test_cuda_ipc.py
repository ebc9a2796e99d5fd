"""Weights between processes through a real device's memory: what ``tests/sync/test_conformance.py`` shows on any
machine with libraries that stand for the vendors', here with the driver itself."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from hardware.cuda.runtime import CudaRuntime
from tests.sync.test_conformance import Engines, copies, digest_of, entries_of, moved, random_model, same
from tests.sync.virtual import Journal
from vime.errors import InvariantViolation
from vime.sync.coordinator import Coordinator, Publication
from vime.sync.device_ipc import DeviceIpcTransport
from vime.sync.drive import Channel, drive
from vime.sync.transport import raw_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs CUDA")


def on_device(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


@pytest.mark.parametrize("to", ["cpu", "device", "shared"])
@pytest.mark.parametrize("seed", range(6))
def test_every_bit_of_any_model_arrives(seed: int, to: Any) -> None:
    transport = DeviceIpcTransport("cuda_ipc", CudaRuntime(), to=to, bucket_bytes=4096)
    tensors = random_model(seed)
    for step in range(3):
        given = on_device(tensors) if step else tensors
        handle = transport.send(given)
        found = transport.receive(handle)
        assert all(tensor.is_cuda == (to != "cpu") for tensor in found.values())
        assert same(copies(found), tensors)
        transport.close_received()
        transport.release(handle)
        tensors = moved(tensors, seed * 10 + step)
    transport.close()


def test_engines_in_other_processes_follow(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload(["tests.sync.processes"])
    transport = DeviceIpcTransport("cuda_ipc", CudaRuntime())
    engines = Engines("cuda_ipc", tmp_path, None)
    attempt = 0
    tensors = random_model(20)
    for version, count in enumerate((1, 2, 3, 4)):
        chosen = engines.take(count)
        channels: dict[str, Channel] = {engine.engine_id: engine.channel() for engine in chosen}
        coordinator = Coordinator(list(channels), Journal(), first_attempt=attempt)
        attempt += 10
        entries = entries_of(tensors)
        handle = transport.send(on_device(tensors))
        publication = Publication(version, digest_of(entries), handle, lambda kept=entries: kept)  # type: ignore[misc]
        coordinator.publish(time.monotonic(), publication)
        outcome = drive(coordinator, channels)
        transport.release(handle)
        assert set(outcome.committed) == set(channels), outcome
        assert all((served := engine.committed()) and served.digest == publication.digest for engine in chosen)
        tensors = moved(tensors, version) if version % 2 else random_model(30 + version)
    for engine in engines.made:
        engine.close()
    transport.close()


def reader(pipe: Connection) -> None:
    transport = DeviceIpcTransport("cuda_ipc", CudaRuntime(), to="shared")
    served: dict[str, torch.Tensor] = {}
    while (order := pipe.recv()) is not None:
        try:
            if "receive" in order:
                served = transport.receive(order["receive"])
                transport.close_received()
            pipe.send({name: raw_bytes(tensor).tolist() for name, tensor in served.items()})
        except InvariantViolation as error:
            pipe.send(str(error))
    served = {}


def test_an_engine_serves_the_trainers_memory_itself() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=reader, args=(theirs,))
    process.start()
    transport = DeviceIpcTransport("cuda_ipc", CudaRuntime(), bucket_bytes=4096)
    tensors = random_model(52)
    one, other = transport.place(tensors), transport.place(moved(tensors, 53))

    def ask(order: dict[str, Any]) -> Any:
        pipe.send(order)
        assert pipe.poll(120)
        return pipe.recv()

    def bytes_of(found: dict[str, torch.Tensor]) -> dict[str, list[int]]:
        return {name: raw_bytes(tensor).tolist() for name, tensor in found.items()}

    assert ask({"receive": transport.send(one)}) == bytes_of(one)
    changed = moved(tensors, 54)
    for name, tensor in one.items():
        tensor.copy_(changed[name])
    torch.cuda.synchronize()
    assert ask({}) == bytes_of(changed) != bytes_of(tensors)
    handle = transport.send(other)
    assert ask({"receive": handle}) == bytes_of(other)
    damaged = {**handle, "buckets": [{**bucket, "handle": "00" * 64} for bucket in handle["buckets"]]}
    assert "cannot be opened on the device" in ask({"receive": damaged})
    pipe.send(None)
    process.join(60)
    transport.close()
