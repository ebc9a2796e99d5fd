"""What this machine has of what vime can use. Nothing here changes the machine or imports an extra."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    ``required``: the portable profile does not run without it. ``used``: this version of vime makes something of it;
    what it makes nothing of yet is not worth installing for vime's sake, and ``remedy`` says what stands in its place.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = False
    used: bool = True


def examine() -> list[Finding]:
    """Look at processor, memory, disk, numerics, libraries and accelerators."""
    return [*_processor(), *_numerics(), *_devices(), *_packages()]


def cpu_flags(text: str) -> frozenset[str]:
    """Feature flags of the first processor in the text of /proc/cpuinfo (``flags`` or, on Arm, ``Features``)."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _processor() -> Iterable[Finding]:
    from rlkernel.kernels.cpu.threads import available_cpus

    flags = cpu_flags(_read("/proc/cpuinfo"))
    fma = bool({"fma", "asimd"} & flags)
    yield Finding(
        "fused multiply-add",
        fma,
        "fma" if "fma" in flags else "asimd" if "asimd" in flags else "not listed in /proc/cpuinfo",
        "the same bits are computed in software, many times slower: use a processor with FMA (any x86-64 since 2013)",
    )
    wide = [name for name in ("avx2", "avx512f", "sve") if name in flags]
    yield Finding(
        "vector units", bool(wide), ", ".join(wide) or "none of avx2, avx512f, sve", "only speed depends on it"
    )
    yield Finding("processors", True, f"{available_cpus()} that this process may use")
    memory = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" in memory:
        available = int(memory["MemAvailable"].split()[0]) * 1024
        enough = available >= 2 * GIB
        yield Finding("memory", enough, f"{available / GIB:.1f} GiB available", "the quickstart needs 2 GiB")
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("disk", free >= GIB, f"{free / GIB:.1f} GiB free in {Path.cwd()}", "the quickstart needs 1 GiB")


def _numerics() -> Iterable[Finding]:
    from rlkernel.errors import NumericsError
    from rlkernel.kernels.cpu.jit import cache_folder
    from rlkernel.kernels.cpu.threads import Workers

    try:
        Workers(2).close()
        kept, found = True, "kept in every thread"
    except NumericsError as error:
        kept, found = False, str(error)
    yield Finding("subnormal numbers", kept, found, "call torch.set_flush_denormal(False)", required=True)
    folder = cache_folder()
    parent = folder
    while not parent.exists():
        parent = parent.parent
    writable = os.access(parent, os.W_OK)
    state = "compiled kernels are there" if folder.exists() and any(folder.iterdir()) else "empty: first run compiles"
    yield Finding(
        "kernel cache", writable, f"{folder} ({state})", f"make {parent} writable, or kernels compile each time"
    )


def _devices() -> Iterable[Finding]:
    import torch

    version = str(torch.__version__)
    yield Finding("torch", True, version, required=True)
    cuda = torch.version.cuda is not None and torch.cuda.is_available()
    hip = getattr(torch.version, "hip", None) is not None and torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda or hip else []
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = ", ".join(names) if cuda else f"none (torch was built {built})"
    yield _accelerator("CUDA devices", cuda, found, "cuda", "an H100 or H200, its driver, and a CUDA build of torch")
    found = ", ".join(names) if hip else "none"
    yield _accelerator("ROCm devices", hip, found, "rocm", "an MI300X, its driver, and a ROCm build of torch")


def _accelerator(name: str, ok: bool, found: str, device: str, needs: str) -> Finding:
    """Devices of a kind, and whether a pipeline can be told to compute on them."""
    from vime.pipeline.schema import Pipeline

    devices = _choices(Pipeline, "device") or ("cpu",)
    if device in devices:
        return Finding(name, ok, found, f"needs {needs}")
    return Finding(name, ok, found, f"not yet usable in a run: pipelines compute on {', '.join(devices)}", used=False)


def _packages() -> Iterable[Finding]:
    """Optional packages. What a pipeline can name is what its schema takes."""
    from vime.pipeline.schema import Pipeline, Rollout, Train

    engines, trainers = _choices(Rollout, "engine"), _choices(Train, "trainer")
    optional = (
        ("triton", True, "compiles and audits the GPU kernels (vime audit)", "triton"),
        ("gguf", True, "reads GGUF files, and vime model fetch needs it", "gguf"),
        ("reasoning-gym", True, "the task 'arithmetic'", "tasks"),
        ("vllm", "vllm" in engines, f"as an engine: stages.rollout.engine takes {', '.join(engines)}", "vllm"),
        (
            "megatron-core",
            "megatron" in trainers,
            f"as a trainer: stages.train.trainer takes {', '.join(trainers)}",
            "megatron",
        ),
        (
            "ray",
            "ray" in _choices(Pipeline, "placement"),
            f"for runs over several machines: placement takes {', '.join(_choices(Pipeline, 'placement'))}",
            "ray",
        ),
        ("hip-python", False, "for weights in the memory of AMD GPUs", "rocm"),
    )
    for name, used, what, extra in optional:
        try:
            found, ok = importlib.metadata.version(name), True
        except importlib.metadata.PackageNotFoundError:
            found, ok = "not installed", False
        remedy = f"{what}: pip install -e '.[{extra}]'" if used else f"not yet usable {what}"
        yield Finding(name, ok, found, remedy, used=used)


def _choices(section: Any, key: str) -> tuple[str, ...]:
    """What a key of the pipeline may be; empty where there is no such key."""
    info = section.model_fields.get(key)
    return () if info is None else tuple(typing.get_args(info.annotation))
