"""Weights, gradients and optimizer of a device, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rlkernel.contract.identity import Identities
from rlkernel.contract.schedules import Schedule
from rlkernel.errors import ContractError, ModelError, NumericsError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.ops.device.gradients import DeviceGradients
from rlkernel.ops.gradients import Gradients
from rlkernel.verify.evidence import Evidence
from tests.audit.interpreted.device_model import PLACE, config, equal, runners, tensors
from tests.audit.interpreted.exact_dot import exact_dot
from vime.train.interface import TrainSample
from vime.train.losses import LossConfig
from vime.train.native.device import DeviceAdamW, DeviceBackend
from vime.train.native.moments import HostMoments
from vime.train.native.optimizer import OptimizerConfig
from vime.train.native.trainer import NativeTrainer, TrainerConfig
from vime.types import SampleId

MODEL = config(qkv_bias=True, qk_norm=False, family="qwen2")
IDENTITIES = Identities("1" * 64, "2" * 64, "3" * 64)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with exact_dot(), np.errstate(all="ignore"):
        yield


def test_manifest_is_read_off_the_fused_bytes():
    cpu, device = runners(MODEL, tp=2)
    before = device.weights.manifest_digest()
    assert before == cpu.weights.manifest_digest()
    for region in device.definition.regions:
        if region.kind in ("qkv_proj", "gate_up_proj"):
            fused = device.weights.matrix(region).view(torch.int32)
            fused[-1, -1] ^= 1
            assert device.weights.manifest_digest() != before, region.name
            fused[-1, -1] ^= 1
    bias = device.weights.bias(device.definition.regions[2])
    assert bias is not None
    bias.view(torch.int32)[3] ^= 1
    assert device.weights.manifest_digest() != before


def test_update_keeps_the_memory_and_takes_copies():
    cpu, device = runners(MODEL, tp=2)
    addresses = [device.weights.matrix(region).data_ptr() for region in device.definition.regions if region.weights]
    other = tensors(MODEL, seed=1)
    device.weights.update(other)
    cpu.weights.update(other)
    assert device.weights.manifest_digest() == cpu.weights.manifest_digest()
    now = [device.weights.matrix(region).data_ptr() for region in device.definition.regions if region.weights]
    assert now == addresses
    for tensor in other.values():
        tensor.zero_()
    assert device.weights.manifest_digest() == cpu.weights.manifest_digest()
    del other["model.norm.weight"]
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        device.weights.update(other)


def test_gradient_leaves_merge_as_on_the_cpu():
    shapes, tied = {"b": (3,), "a": (2, 2)}, "a"
    own = Gradients(shapes, tied_embedding=tied, leaves=4)
    theirs = DeviceGradients(shapes, PLACE, tied_embedding=tied, leaves=4)
    generator = np.random.default_rng(0)
    for leaf in range(4):
        for name in shapes:
            value = generator.standard_normal(shapes[name]).astype(np.float32) * np.float32(10.0) ** leaf
            own.buffer(name)[:] = value
            theirs.buffer(name).copy_(torch.from_numpy(value))
        part = generator.standard_normal(shapes["a"]).astype(np.float32)
        own.embedding("a")[:] = part
        theirs.embedding("a").copy_(torch.from_numpy(part))
        own.end_leaf()
        theirs.end_leaf()
    with pytest.raises(ContractError, match="5 gradient leaves were ended, the contract has 4"):
        theirs.end_leaf()


def test_finished_gradients_are_the_cpus():
    shapes = {"b": (3,), "a": (2, 2)}
    own, theirs = Gradients(shapes, leaves=2), DeviceGradients(shapes, PLACE, leaves=2)
    with pytest.raises(ContractError, match="0 of 2 gradient leaves were ended"):
        theirs.finish()
    generator = np.random.default_rng(0)
    for _ in range(2):
        for name in shapes:
            value = generator.standard_normal(shapes[name]).astype(np.float32)
            own.buffer(name)[:] = value
            theirs.buffer(name).copy_(torch.from_numpy(value))
        own.end_leaf()
        theirs.end_leaf()
    found = theirs.finish()
    assert all(equal(found[name], value) for name, value in own.finish().items())
    with pytest.raises(ContractError, match="must be a power of two"):
        DeviceGradients(shapes, PLACE, leaves=3)


def trainers() -> tuple[NativeTrainer, NativeTrainer]:
    made = []
    for runner, backend in zip(runners(MODEL), (None, DeviceBackend(PLACE, Workers(1))), strict=True):
        settings = TrainerConfig(
            OptimizerConfig(Schedule(1e-2)), LossConfig(policy="reinforce"), data_parallel_leaves=2,
            micro_batch_samples=1, activation_checkpointing=True,
        )  # fmt: skip
        made.append(
            NativeTrainer(
                runner, tensors(MODEL), settings, IDENTITIES, dtype="float32", workers=Workers(1), backend=backend
            )
        )
    return made[0], made[1]


def samples() -> list[TrainSample]:
    return [TrainSample(SampleId("train", 0, k), (1, 2), (3 + k,), np.ones(1, np.bool_), 1.0 - 2 * k) for k in range(2)]


def test_training_checkpoint_and_a_flipped_bit(tmp_path):
    cpu, device = trainers()
    expected, found = cpu.train(0, samples()), device.train(0, samples())
    assert found.gradient_digest == expected.gradient_digest
    assert (found.grad_norm, found.loss) == (expected.grad_norm, expected.loss)
    assert device.manifest_digest() == cpu.manifest_digest()
    assert device.save(tmp_path / "device") == cpu.save(tmp_path / "cpu")
    device.load(tmp_path / "cpu")
    assert device.manifest_digest() == cpu.manifest_digest()
    master = device._optimizer._masters["model.norm.weight"]  # type: ignore[attr-defined]
    master.view(torch.int32)[0] ^= 1
    with pytest.raises(NumericsError, match=r"element 0 of model\.norm\.weight is not its float32 master"):
        device.train(1, samples())


def test_moments_on_the_host_change_no_bit() -> None:
    shapes = {"b": (3, 7), "a": (40,), "c": (5,)}
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    config, evidence = OptimizerConfig(Schedule(1e-2), weight_decay=0.1), Evidence("test")
    both = [DeviceAdamW(config, tensors, "bfloat16", PLACE, evidence, where) for where in ("device", "host")]
    both[1]._moments = HostMoments(both[1]._masters, part=16)  # tensors of several parts, and parts of several sizes
    for _ in range(3):
        gradients = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        weights = [optimizer.update(gradients)[2] for optimizer in both]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in shapes)
    states = [optimizer.state() for optimizer in both]
    for kind in ("master", "moment1", "moment2"):
        for name in shapes:
            one, other = (getattr(state, kind)[name] for state in states)
            assert (one.view(np.uint32) == other.view(np.uint32)).all() and np.abs(one).max() > 0
    again = DeviceAdamW(config, tensors, "bfloat16", PLACE, evidence, "host")
    again.restore(states[0])
    for name, value in again.state().moment2.items():
        assert (value == states[0].moment2[name]).all()
