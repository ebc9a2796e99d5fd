"""What every transport keeps to: any model that a contract knows, one to four engines, every bit, and nothing left."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hardware.cuda.runtime import CudaRuntime
from hardware.rocm.runtime import HipRuntime
from rlkernel.errors import DeviceError
from tests.sync import fake_devices
from tests.sync.processes import planned_engine, shared_reader
from tests.sync.virtual import HeldEngine, Journal, digest_of, entries_of
from vime.errors import InputError, Interrupted, InvariantViolation
from vime.runtime.process import ProcessEngine
from vime.sync.coordinator import Coordinator, Publication
from vime.sync.device_ipc import DeviceIpcTransport
from vime.sync.drive import Channel, LocalChannel, drive
from vime.sync.participant import Participant
from vime.sync.transport import Transport, raw_bytes
from vime.sync.transports import TRANSPORTS, make_transport

Tensors = dict[str, torch.Tensor]
BETWEEN_PROCESSES = [name for name in TRANSPORTS if name != "memory"]
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(), (1,), (7,), (0,), (3, 5), (64, 64), (2, 0, 4), (1, 1, 129), (257, 3)]


def random_model(seed: int) -> Tensors:
    """Bits of every kind in every shape; with tensors that share memory, and shards of a larger one that are no
    contiguous block of it."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for number in range(draw.randrange(4, 12)):
        dtype, shape = draw.choice(DTYPES), draw.choice(SHAPES)
        words = torch.int32 if dtype is torch.float32 else torch.int16
        size = torch.Size(shape).numel()
        bits = torch.randint(torch.iinfo(words).min, torch.iinfo(words).max, (size,), generator=generator, dtype=words)
        tensors[f"layers.{number}.weight"] = bits.view(dtype).reshape(shape)
    whole = torch.randn(16, 24, generator=generator).to(draw.choice(DTYPES))
    tensors["embed"] = tensors["lm_head"] = whole  # tied
    tensors["columns.0"], tensors["columns.1"] = whole[:, :12], whole[:, 12:]
    tensors["transposed"] = whole.T
    return tensors


def moved(tensors: Tensors, seed: int) -> Tensors:
    """The next step's weights: some of the tensors are others."""
    draw = random.Random(seed)
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in draw.sample(sorted(result), len(result) // 2):
        raw = result[name].reshape(-1)
        if raw.numel():
            raw.view(torch.uint8)[draw.randrange(raw.numel() * raw.element_size())] ^= 1 << draw.randrange(8)
            result[name] = raw.reshape(result[name].shape)
    return result


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(found: Tensors, wanted: Tensors) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].shape == tensor.shape
        and found[name].dtype == tensor.dtype
        and raw_bytes(found[name]).tobytes() == raw_bytes(tensor).tobytes()
        for name, tensor in wanted.items()
    )


SEGMENTS: set[str] = set()
"""Shared memory of the transports made here; other processes have some of their own."""


def left(folder: Path) -> set[str]:
    """What transports of this process leave on this machine."""
    own = f"fakehip-{os.getpid()}-"
    segments = {name for name in os.listdir("/dev/shm") if name in SEGMENTS or name.startswith(own)}
    return segments | {str(path) for path in folder.rglob("*") if path.is_file()}


RUNTIMES = {"hip_ipc": HipRuntime, "cuda_ipc": CudaRuntime}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Libraries that stand for device runtimes, loaded here: this process sees the devices bb and aa."""
    if not fake_devices.can_be_built():
        pytest.skip(fake_devices.NEEDS)
    folder = tmp_path_factory.mktemp("devices")
    found = {name: fake_devices.build(name, folder) for name in RUNTIMES}
    for library in found.values():
        fake_devices.load(library, "bb,aa")
    return found


@pytest.fixture(params=list(RUNTIMES))
def device_ipc(request: pytest.FixtureRequest, libraries: dict[str, str]) -> Callable[..., DeviceIpcTransport]:
    """Makes a transport over each kind of device."""
    return partial(DeviceIpcTransport, request.param, RUNTIMES[request.param]())


def make(name: str, folder: Path, request: pytest.FixtureRequest) -> Transport:
    if name in RUNTIMES:
        request.getfixturevalue("libraries")
        return DeviceIpcTransport(name, RUNTIMES[name](), ordinal=1, bucket_bytes=1500)
    made = make_transport(name, folder)
    send = made.send

    def noted(tensors: Any) -> Any:
        handle = send(tensors)
        SEGMENTS.add(handle.get("segment", ""))
        return handle

    made.send = noted  # type: ignore[method-assign]
    return made


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    before = left(tmp_path)
    made = make(request.param, tmp_path / "weights", request)
    yield made
    made.close()
    assert left(tmp_path) <= before


@pytest.mark.parametrize("seed", range(8))
def test_every_bit_of_any_model_arrives(transport: Transport, seed: int) -> None:
    tensors = random_model(seed)
    for step in range(3):
        wanted = copies(tensors)  # the transport in memory hands over the tensors themselves
        handle = transport.send(tensors)
        assert same(transport.receive(handle), wanted)
        transport.close_received()
        transport.release(handle)
        tensors = moved(tensors, seed * 10 + step)


def test_publications_that_overlap_keep_apart(transport: Transport) -> None:
    """An engine may fetch the older one while the newer one is there, and again after a repeat."""
    first = random_model(1)
    second = moved(first, 2)
    wanted = copies(first), copies(second)
    one, other = transport.send(first), transport.send(second)
    for _ in range(2):
        assert same(transport.receive(one), wanted[0]) and same(transport.receive(other), wanted[1])
        assert not same(transport.receive(one), wanted[1])
        transport.close_received()
    transport.release(one)
    assert same(transport.receive(other), wanted[1])
    transport.close_received()
    transport.release(other)
    transport.release(other)


def test_what_arrived_is_the_receivers_own(transport: Transport) -> None:
    """It stays as it is when what was sent is freed; embedded engines copy what they are handed."""
    tensors = random_model(3)
    wanted = copies(tensors)
    handle = transport.send(tensors)
    found = transport.receive(handle)
    transport.close_received()
    transport.release(handle)
    transport.release(transport.send(moved(tensors, 4)))  # memory that is used again
    assert same(found, wanted)


@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
def test_what_was_freed_cannot_be_received(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    transport = make(name, tmp_path, request)
    handle = transport.send(random_model(4))
    transport.release(handle)
    transport.close()
    with pytest.raises(InvariantViolation):
        transport.receive(handle)


@pytest.mark.parametrize("name", ["disk", "disk_delta"])
def test_a_full_disk_is_one_to_resume_after(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, os.strerror(28))

    transport = make_transport(name, tmp_path)
    tensors = random_model(5)
    with monkeypatch.context() as patch:
        patch.setattr("vime.sync.transport.save_file", full)
        with pytest.raises(Interrupted, match="make room, then resume"):
            transport.send(tensors)
    assert left(tmp_path) & {str(path) for path in tmp_path.rglob("*")} == set()
    handle = transport.send(tensors)  # nothing of the failed one is counted on
    assert same(transport.receive(handle), tensors)


def test_a_delta_is_what_changed(tmp_path: Path) -> None:
    transport = make_transport("disk_delta", tmp_path)
    tensors = random_model(6)
    first = transport.send(tensors)
    assert first["written"] == sorted(tensors)
    again = transport.send(tensors)
    assert again["written"] == [] and same(transport.receive(again), tensors)
    after = moved(tensors, 7)
    changed = sorted(n for n in tensors if raw_bytes(tensors[n]).tobytes() != raw_bytes(after[n]).tobytes())
    third = transport.send(after)
    assert third["written"] == changed and 0 < len(changed) < len(tensors)
    transport.release(first)
    transport.release(again)
    late = make_transport("disk_delta", tmp_path)  # an engine that was not there before
    assert same(late.receive(third), after)
    del after["embed"]
    fourth = transport.send(after)
    assert fourth["written"] == [] and same(late.receive(fourth), after)


def test_a_flipped_bit_in_a_file_of_a_delta_is_named(tmp_path: Path) -> None:
    transport = make_transport("disk_delta", tmp_path)
    handle = transport.send({"a": torch.ones(1000), "b": torch.zeros(1000)})
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvariantViolation, match=r"tensor [ab] in .* has the SHA-256"):
        transport.receive(handle)


class Engines:
    """Processes that are started when they are needed, and serve every test of a transport."""

    def __init__(self, name: str, folder: Path, library: str | None) -> None:
        self._name, self._folder, self._library = name, folder, library
        self.made: list[ProcessEngine] = []

    def take(self, count: int) -> list[ProcessEngine]:
        while len(self.made) < count:
            specification: dict[str, Any] = {
                "engine_id": f"e{len(self.made)}", "transport": self._name, "transport_folder": str(self._folder),
            }  # fmt: skip
            if self._library is not None:  # each sees the devices in another order
                devices = ("aa,bb", "bb,cc,aa", "aa", "cc,aa,bb")[len(self.made)]
                specification["fake"] = {"library": self._library, "devices": devices}
            self.made.append(ProcessEngine(planned_engine, specification, start_method="forkserver"))
        return self.made[:count]


@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
def test_engines_in_other_processes_follow(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One to four, one after the other joining; every version of another random model."""
    multiprocessing.set_forkserver_preload(["tests.sync.processes"])
    before = left(tmp_path)
    transport = make(name, tmp_path / "weights", request)
    library = request.getfixturevalue("libraries")[name] if name in RUNTIMES else None
    engines = Engines(name, tmp_path / "weights", library)
    attempt = 0
    tensors = random_model(20)
    for version, count in enumerate((1, 2, 3, 4)):
        chosen = engines.take(count)
        channels: dict[str, Channel] = {engine.engine_id: engine.channel() for engine in chosen}
        coordinator = Coordinator(list(channels), Journal(), first_attempt=attempt)
        attempt += 10
        entries = entries_of(tensors)
        handle = transport.send(tensors)
        publication = Publication(version, digest_of(entries), handle, lambda kept=entries: kept)  # type: ignore[misc]
        coordinator.publish(time.monotonic(), publication)
        outcome = drive(coordinator, channels)
        transport.release(handle)
        assert set(outcome.committed) == set(channels), outcome
        served = [engine.committed() for engine in chosen]
        assert {(found and found.version, found and found.digest) for found in served} == {
            (version, publication.digest)
        }
        tensors = moved(tensors, version) if version % 2 else random_model(30 + version)
    for engine in engines.made:
        engine.close()
    transport.close()
    assert left(tmp_path) <= before


@pytest.mark.parametrize("seed", range(4))
def test_any_flipped_bit_is_refused(transport: Transport, seed: int) -> None:
    """Whatever a transport does to a bit, the engine's digest is not the published one, and the old version serves."""
    draw = random.Random(seed)
    tensors = random_model(seed + 40)
    engine = HeldEngine("e0")
    whole = transport.receive

    def receive(handle: Any) -> Tensors:
        found = {name: tensor.clone() for name, tensor in whole(handle).items()}
        name = draw.choice([name for name, tensor in found.items() if tensor.numel()])
        raw = found[name].contiguous().reshape(-1).view(torch.uint8)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        found[name] = raw.view(tensors[name].dtype).reshape(tensors[name].shape)
        return found

    transport.receive = receive  # type: ignore[method-assign]
    coordinator = Coordinator(["e0"], Journal())
    entries = entries_of(tensors)
    coordinator.publish(0.0, Publication(0, digest_of(entries), transport.send(tensors), lambda: entries))
    outcome = drive(coordinator, {"e0": LocalChannel(Participant(engine, transport))}, clock=lambda: 0.0)
    assert outcome.rolled_back and "the bytes of tensor" in outcome.reason
    assert engine.token() is None


def test_a_device_that_is_not_seen_is_named(device_ipc: Callable[..., DeviceIpcTransport]) -> None:
    transport = device_ipc()
    handle = transport.send(random_model(8))
    with pytest.raises(InputError, match=r"this process sees b{32}, a{32}: let engine and trainer see the same"):
        transport.receive({**handle, "device": "c" * 32})
    transport.close()


def test_no_room_on_the_device_is_one_to_resume_after(
    device_ipc: Callable[..., DeviceIpcTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = device_ipc(bucket_bytes=4096)
    before = left(Path("/dev/shm/none"))
    tensors = {f"t{n}": torch.ones(1000) for n in range(4)}
    monkeypatch.setenv("FAKE_HIP_MEMORY", "9000")
    with pytest.raises(Interrupted, match=r"(hipMalloc|cuMemAlloc_v2) failed: \w+; make room on it, then"):
        transport.send(tensors)
    assert left(Path("/dev/shm/none")) == before  # the buckets that there was room for are given back
    monkeypatch.setenv("FAKE_HIP_MEMORY", "17000")
    handle = transport.send(tensors)
    assert len(handle["buckets"]) == 4 and same(transport.receive(handle), tensors)
    transport.release(handle)
    again = transport.send({name: tensor * 2 for name, tensor in tensors.items()})
    assert again["buckets"] == handle["buckets"]  # the memory is used again
    transport.close()


def test_placed_weights_are_published_without_a_copy(
    device_ipc: Callable[..., DeviceIpcTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = device_ipc(bucket_bytes=4096, host_memory=True)
    tensors = random_model(50)
    one, other = transport.place(tensors), transport.place(tensors)
    assert same(one, tensors) and same(other, tensors)
    copied: list[int] = []
    runtime = transport._runtime
    monkeypatch.setattr(runtime, "copy", lambda target, source, size: copied.append(size))
    first, second = transport.send(one), transport.send(other)
    assert copied == []
    assert {b["handle"] for b in first["buckets"]}.isdisjoint(b["handle"] for b in second["buckets"])
    mixed = {**one, "embed": other["embed"]}
    transport.release(transport.send(mixed))  # not what was placed: it is copied
    assert sum(copied) == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    monkeypatch.undo()
    changed = moved(tensors, 51)
    for name, tensor in other.items():
        tensor.copy_(changed[name])
    assert same(transport.receive(second), changed) and same(transport.receive(first), tensors)
    transport.release(first)
    assert same(transport.receive(first), tensors)  # a placement stays until the end
    transport.close()


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_an_engine_can_serve_the_trainers_memory_itself(name: str, libraries: dict[str, str]) -> None:
    def bytes_of(found: Tensors) -> dict[str, list[int]]:
        return {key: raw_bytes(tensor).tolist() for key, tensor in found.items()}

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=shared_reader, args=(theirs, name, libraries[name], "aa,bb"))
    process.start()
    transport = DeviceIpcTransport(name, RUNTIMES[name](), ordinal=1, bucket_bytes=4096, host_memory=True)
    tensors = random_model(52)
    one, other = transport.place(tensors), transport.place(moved(tensors, 53))

    def ask(order: dict[str, Any]) -> Any:
        pipe.send(order)
        assert pipe.poll(60)
        return pipe.recv()

    first, second = transport.send(one), transport.send(other)
    assert ask({"receive": first}) == bytes_of(one)
    changed = moved(tensors, 54)
    for key, tensor in one.items():
        tensor.copy_(changed[key])
    assert ask({}) == bytes_of(changed) != bytes_of(tensors)  # no copy lies in between
    assert ask({"receive": second}) == bytes_of(other)
    for tensor in one.values():
        tensor.zero_()
    assert ask({}) == bytes_of(other)  # what is served is the other placement
    ask({"forget": first})
    assert ask({"receive": second}) == bytes_of(other)
    pipe.send(None)
    process.join(30)
    assert process.exitcode == 0
    transport.close()


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_the_runtime_says_what_failed(name: str, libraries: dict[str, str]) -> None:
    runtime = RUNTIMES[name]()
    assert [runtime.identity(ordinal) for ordinal in range(runtime.device_count())] == ["bb" * 16, "aa" * 16]
    runtime.use(1)
    address = runtime.allocate(100)
    for call, cause in (
        (lambda: runtime.use(2), "INVALIDDEVICE"),
        (lambda: runtime.identity(7), "INVALIDDEVICE"),
        (lambda: runtime.open(runtime.export(address)), "INVALIDCONTEXT"),
        (lambda: runtime.open(bytes(64)), "INVALIDVALUE"),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.name.upper().replace("_", "") in (f"HIPERROR{cause}", f"CUDAERROR{cause}")
    runtime.free(address)


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_a_receiver_that_went_by_ordinals_is_refused(name: str, tmp_path: Path, libraries: dict[str, str]) -> None:
    """What the engines of the tests above would meet: the sender's ordinal 1 is another device to them."""
    script = tmp_path / "by_ordinal.py"
    script.write_text(
        "import json, sys\n"
        "from tests.sync import fake_devices\n"
        "fake_devices.load(sys.argv[2], 'aa,bb')\n"
        "from vime.sync.transports import make_transport\n"
        "transport = make_transport(sys.argv[1], None)\n"
        "if sys.argv[4] == 'ordinal': transport._ordinal_of = lambda identity: 1\n"
        "found = transport.receive(json.loads(sys.argv[3]))\n"
        "print(found['a'].tolist())\n"
    )
    transport = DeviceIpcTransport(name, RUNTIMES[name](), ordinal=1)
    handle = json.dumps(transport.send({"a": torch.arange(3.0)}))
    outcomes = {
        way: subprocess.run(
            [sys.executable, str(script), name, libraries[name], handle, way],
            capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for way in ("uuid", "ordinal")
    }  # fmt: skip
    transport.close()
    assert outcomes["uuid"].stdout == "[0.0, 1.0, 2.0]\n", outcomes["uuid"].stderr
    assert "InvariantViolation: the published weights cannot be opened on the device" in outcomes["ordinal"].stderr


REAL = """
from hardware.rocm.runtime import HipRuntime
from rlkernel.errors import DeviceError
runtime = HipRuntime()
print("devices", runtime.device_count())
for name, call in {
    "use": lambda: runtime.use(0), "allocate": lambda: runtime.allocate(1024), "open": lambda: runtime.open(bytes(64)),
    "identity": lambda: runtime.identity(0), "copy": lambda: runtime.copy(0, 0, 16),
}.items():
    try:
        call()
    except DeviceError as error:
        print(name, error.name)
"""


def test_the_real_runtime_without_a_device_says_so() -> None:
    """AMD's own library, where it is installed: its error codes come through by name."""
    if find_library("amdhip64") is None:
        pytest.skip("libamdhip64 is not installed")
    found = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True, timeout=120)
    lines = found.stdout.splitlines()
    if lines[0] != "devices 0":
        pytest.skip("there is a device")
    names = ("use", "allocate", "open", "identity", "copy")
    assert lines[1:] == [f"{name} hipErrorInvalidDevice" for name in names]


def test_without_a_runtime_one_sentence_says_what_is_missing() -> None:
    if find_library("amdhip64") is not None:
        pytest.skip("libamdhip64 is installed")
    code = "from hardware.rocm.runtime import HipRuntime; HipRuntime()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "the HIP runtime cannot be used: failed to dlopen" in found.stderr
