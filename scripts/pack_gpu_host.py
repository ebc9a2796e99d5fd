#!/usr/bin/env python3
"""Pack what a Hopper host without a network lacks (CPython 3.12, torch 2.11 for CUDA 13) into a folder to carry there.

    python3 scripts/pack_gpu_host.py OUT [--vllm]        downloads wheels, then packs
    bash OUT/unpack.sh SITE                              on the host; then: export PYTHONPATH=SITE

Without ``--vllm``: the packages that vime itself needs beside torch, NumPy and Triton (a few MiB). With it also
vLLM 0.26.0, the newest release for that torch, in about 52 MiB: only what a dense or mixture-of-experts model in
bfloat16 needs, and in its shared objects only the code of sm_90 (the other images are zeroed where they lie, so that
nothing moves and xz removes them). On the host also set VLLM_USE_FLASHINFER_SAMPLER=0 and HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import argparse
import lzma
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VLLM = "vllm==0.26.0"
GLIBCS = (35, 34, 31, 28, 27, 26, 24, 17, 5)
PLATFORMS = [*(f"manylinux_2_{n}_x86_64" for n in GLIBCS), "manylinux2014_x86_64", "manylinux1_x86_64"]
VIME_NEEDS = [
    "structlog",
    "zarr",
    "numcodecs",
    "pydantic==2.12.5",
    "pydantic-core==2.41.5",
    "donfig",
    "google-crc32c",
    "annotated-types",
    "typing-inspection",
    "msgspec",
    "gguf",
]
VLLM_NEEDS = [
    "apache-tvm-ffi",
    "astor",
    "blake3",
    "cachetools",
    "cbor2",
    "compressed-tensors==0.17.0",
    "depyf==0.20.0",
    "dill",
    "diskcache",
    "distro",
    "fastapi<0.137",
    "ijson",
    "importlib-metadata",
    "jiter",
    "llguidance<1.8",
    "loguru",
    "openai<3",
    "openai-harmony==0.0.8",
    "opentelemetry-api",
    "partial-json-parser",
    "pybase64",
    "pydantic-extra-types",
    "python-json-logger",
    "python-multipart",
    "pyzmq",
    "setproctitle",
    "sniffio",
    "starlette",
    "xgrammar",
]
KEPT_OBJECTS = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/fs_io_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
DROPPED = ("vllm/vllm-rs", "vllm/third_party/deep_gemm/include", "vllm/third_party/fmha_sm100/cutlass")
FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, ELF, ARCHITECTURE = 1, 2, 90
UNPACK = """#!/bin/bash
# bash unpack.sh SITE
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
mkdir -p "$1"
extract() {
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1], 'r:xz').extractall(sys.argv[2], filter='data')" "$1" "$2"
}
extract "$here/wheels.tar.xz" "$scratch"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$1" "$scratch"/*.whl
rm -r "$scratch"
[ ! -f "$here/vllm.tar.xz" ] || extract "$here/vllm.tar.xz" "$1"
"""


def download(requirements: list[str], into: Path) -> None:
    """Wheels for CPython 3.12 on x86_64. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(into)]
    command += [
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        "--abi",
        "cp312",
        "--abi",
        "abi3",
        "--abi",
        "none",
    ]
    subprocess.run([*command, *(f"--platform={p}" for p in PLATFORMS), *requirements], check=True)


def images(blob: bytearray, start: int, end: int) -> list[tuple[int, int, int, int]]:
    """Kind, architecture, offset and length of the images between two offsets of a fatbin."""
    found = []
    while start < end:
        kind, _, header, length = struct.unpack_from("<HHIQ", blob, start)
        found.append((kind, struct.unpack_from("<I", blob, start + 28)[0], start + header, length))
        start += header + length
    return found


def blank_other_architectures(blob: bytearray) -> None:
    """Zero every image that sm_90 does not need; PTX stays only where a fatbin has no machine code for it."""
    at = 0
    while (at := blob.find(FATBIN_MAGIC, at)) != -1:
        _, version, header, size = struct.unpack_from("<IHHQ", blob, at)
        if version != 1 or header != 16 or at + header + size > len(blob):
            at += 4
            continue
        every = images(blob, at + header, at + header + size)
        native = any(kind == ELF and arch == ARCHITECTURE for kind, arch, *_ in every)
        ptx = max((arch for kind, arch, *_ in every if kind == PTX and arch <= ARCHITECTURE), default=None)
        for kind, arch, start, length in every:
            wanted = (ELF, ARCHITECTURE) if native else (PTX, ptx)
            if (kind, arch) != wanted:
                blob[start : start + length] = bytes(length)
        at += header + size


def pack_vllm(out: Path) -> None:
    """``vllm.tar.xz`` in ``out``."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        download([VLLM], Path(scratch))
        with zipfile.ZipFile(next(Path(scratch).glob("vllm-*.whl"))) as archive:
            for name in archive.namelist():
                if name in KEPT_OBJECTS or not (name.endswith((".so", ".js")) or name.startswith(DROPPED)):
                    archive.extract(name, tree)
        for name in KEPT_OBJECTS:
            blob = bytearray((tree / name).read_bytes())
            blank_other_architectures(blob)
            (tree / name).write_bytes(blob)
        pack(tree, out / "vllm.tar.xz")


def pack(tree: Path, archive: Path) -> None:
    """What lies in ``tree``, as a .tar.xz."""
    with lzma.open(archive, "wb", preset=9) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for entry in sorted(tree.iterdir()):
            tar.add(entry, entry.name)


def pack_wheels(requirements: list[str], out: Path) -> int:
    """``wheels.tar.xz`` in ``out``, from wheels that are not compressed themselves; returns how many."""
    with tempfile.TemporaryDirectory() as scratch:
        compressed, plain = Path(scratch) / "compressed", Path(scratch) / "plain"
        plain.mkdir()
        download(requirements, compressed)
        for wheel in compressed.iterdir():
            with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(plain / wheel.name, "w") as target:
                for member in source.infolist():
                    target.writestr(member.filename, source.read(member))
        pack(plain, out / "wheels.tar.xz")
        return len(list(plain.iterdir()))


def main() -> int:
    """Download, pack, say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vllm", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    wheels = pack_wheels([*VIME_NEEDS, *(VLLM_NEEDS if given.vllm else [])], given.out)
    if given.vllm:
        pack_vllm(given.out)
    (given.out / "unpack.sh").write_text(UNPACK)
    total = sum(file.stat().st_size for file in given.out.rglob("*") if file.is_file())
    print(f"{given.out}: {total / 2**20:.1f} MiB, {wheels} wheels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
