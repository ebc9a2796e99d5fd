"""Which device a pipeline may name, with which contract; and that it changes no bit-relevant key."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlkernel.verify.vectors import gpu
from tests.pipeline.helpers import loaded, problems_of
from vime.pipeline.machine import bytes_per_parameter
from vime.pipeline.prepare import prepare
from vime.pipeline.schema import bit_relevant
from vime.pipeline.sizes import bytes_per_block

HOPPER = ("contract.profile=hopper", "contract.dtype=bfloat16")
H200 = SimpleNamespace(name="sm_90", device="NVIDIA H200", profiles=gpu.PROFILES["sm_90"])


def found(*overrides: str) -> list[tuple[str, str]]:
    pipeline = loaded(*overrides)
    return [(p.key, str(p)) for p in problems_of(lambda: prepare(pipeline))]


def test_cuda_without_a_gpu_is_refused_with_the_reason(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "gpu_backend", lambda: "this machine has no GPU that torch can use")
    ((key, sentence),) = found("device=cuda")
    assert key == "device"
    assert "'cuda' cannot be used: this machine has no GPU that torch can use; 'cpu' can" in sentence


def test_a_profile_of_another_gpu_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "gpu_backend", lambda: H200)
    assert found("device=cuda", *HOPPER) == []
    assert found("device=cuda", "contract.dtype=bfloat16") == []
    ((key, sentence),) = found("device=cuda", "contract.profile=cdna3", "contract.dtype=bfloat16")
    assert key == "contract.profile"
    assert "cdna3 with bfloat16 has no kernels on NVIDIA H200 (sm_90)" in sentence
    assert "hopper with bfloat16" in sentence


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (HOPPER, "contract.profile", ["device is 'cpu'", "device: cuda"]),
        (("device=cuda", "contract.profile=hopper"), "contract.dtype", ["'float32'", "matrix unit takes bfloat16"]),
        (
            (
                "device=cuda",
                "numerics.rollout=native",
                "on_mismatch=continue",
                "stages.rollout.sampling.top_k=5",
                "stages.train.require_full_distribution=false",
            ),
            "stages.rollout.sampling.top_k",
            ["whole distributions on a GPU", "top_k: 0"],
        ),
        (("stages.train.moments=host",), "stages.train.moments", ["device is 'cpu'", "on the host"]),
        (("device=cuda", "model.overrides={head_dim: 24}"), "device", ["head_dim = 24", "multiple of 16"]),
    ],
)
def test_what_a_device_does_not_compute(monkeypatch, overrides, key, words) -> None:
    monkeypatch.setattr(gpu, "gpu_backend", lambda: H200)
    problems = dict(found(*overrides))
    assert key in problems, problems
    assert all(word in problems[key] for word in words), problems[key]


def test_native_kernels_run_on_both_sides_of_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "gpu_backend", lambda: H200)
    sides = ("numerics.trainer=native", "numerics.rollout=native", "on_mismatch=continue")
    assert not found("device=cuda", "contract.profile=hopper", "contract.dtype=bfloat16", *sides)


def test_the_device_changes_no_bit() -> None:
    assert bit_relevant(loaded("device=cuda").pipeline) == bit_relevant(loaded().pipeline)
    assert bit_relevant(loaded("contract.dtype=bfloat16").pipeline) != bit_relevant(loaded().pipeline)


def test_pages_on_a_gpu_have_the_contracts_dtype(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "gpu_backend", lambda: H200)
    config = prepare(loaded()).config
    sizes = [
        bytes_per_block(loaded(f"device={device}", f"contract.dtype={dtype}").pipeline, config)
        for device, dtype in (("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "float32"), ("cuda", "bfloat16"))
    ]
    assert sizes == [2 * 2 * 2 * 16 * 16 * width for width in (4, 4, 4, 2)]


def test_moments_on_the_host_leave_the_gpus_memory() -> None:
    given = ("device=cuda", *HOPPER)
    everything = bytes_per_parameter(loaded(*given).pipeline)
    assert everything - bytes_per_parameter(loaded(*given, "stages.train.moments=host").pipeline) == 8
    assert bytes_per_parameter(loaded("device=cuda").pipeline) - everything == 8  # four copies of weights in float32
