"""The first-use check of a device, the interpreter itself in place of its kernels: right ones pass, others do not."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.rope_tables import rope_tables
from rlkernel.errors import NumericsError
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import define_model
from rlkernel.ops.composition import Composition
from rlkernel.ops.host import RopeTables, TokenBatch
from rlkernel.ops.weights import DTYPES, dgrad_order
from rlkernel.reference.head import ReferenceLinearLogprob
from rlkernel.reference.regions import Interpreter, reference_ops
from rlkernel.verify.admission.first_use_device import with_device_first_use_checks
from rlkernel.verify.evidence import Evidence

MODEL = ModelConfig(
    family="qwen3", vocab_size=300, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=16, max_position=32, qk_norm=True,
)  # fmt: skip
BIASED = ModelConfig(
    family="qwen2", vocab_size=130, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2,
    head_dim=16, max_position=32, qk_norm=False, qkv_bias=True,
)  # fmt: skip
LENGTHS = (5, 3)
ROWS = sum(LENGTHS)


class Weights:
    """Fused matrices of a device as :class:`rlkernel.ops.device.weights.DeviceWeights` has them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._config, self._tp, self._shapes = config, tp, config.weight_shapes()
        self.tensors = {
            name: (torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)).to(dtype)
            for name, shape in self._shapes.items()
        }

    def _rows(self, region: Any, end: str) -> torch.Tensor:
        rows = torch.cat([self.tensors[name] for name in region.weights if name.endswith(end)])
        return rows[self.order(region)] if region.kind in ("qkv_proj", "gate_up_proj") else rows

    def matrix(self, region: Any) -> torch.Tensor:
        return self._rows(region, ".weight")

    def bias(self, region: Any) -> torch.Tensor | None:
        return self._rows(region, ".bias") if region.weights[-1].endswith(".bias") else None

    def vector(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def order(self, region: Any) -> torch.Tensor:
        return torch.from_numpy(dgrad_order(region, self._shapes, self._config.num_kv_heads, self._tp))


class Chains:
    """Running gradients on the device; the interpreter writes through their NumPy views."""

    def __init__(self, config: ModelConfig) -> None:
        self._chains = {name: torch.ones(shape) for name, shape in config.weight_shapes().items()}

    def buffer(self, name: str) -> torch.Tensor:
        return self._chains[name]

    embedding = buffer


class Views(Chains):
    def __init__(self, chains: Any) -> None:
        self._chains = chains

    def buffer(self, name: str) -> Any:
        return self._chains.buffer(name).numpy()

    embedding = buffer


class Faced:
    """The interpreter of a region with tensors at its ports; ``wrong`` names the results whose last bit is another."""

    def __init__(self, op: Any, dtype: torch.dtype, wrong: str = "") -> None:
        self.implementation, self._op, self._dtype, self._wrong = "test.reference", op, dtype, wrong

    def _host(self, host: Any) -> Any:
        own = SimpleNamespace(read_rows=None, **vars(host))
        own.batch = TokenBatch(host.batch.tokens.numpy(), host.batch.positions.numpy(), host.batch.starts.numpy())
        own.rope = RopeTables(host.cos.numpy(), host.sin.numpy())
        own.weights = SimpleNamespace(tensors=host.weights.tensors)
        own.gradients = None if host.gradients is None else Views(host.gradients)
        return own

    def _in(self, values: Any) -> list[Any]:
        return [x.float().numpy() if x.is_floating_point() else x.numpy() for x in values]

    def _out(self, values: Any, wrong: bool) -> tuple[torch.Tensor, ...]:
        tensors = [torch.from_numpy(np.ascontiguousarray(x)).to(self._dtype) for x in values]
        if wrong and tensors:
            bits = tensors[0].view(torch.int32 if self._dtype == torch.float32 else torch.int16)
            bits ^= 1
        return tuple(tensors)

    def forward(self, region: Any, inputs: Any, host: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        outputs, saved = self._op.forward(region, self._in(inputs), self._host(host))
        return self._out(outputs, self._wrong == "forward"), saved

    def backward(self, region: Any, saved: Any, grads: Any, host: Any) -> tuple[torch.Tensor, ...]:
        own = self._host(host)
        found = self._op.backward(region, saved, self._in(grads), own)
        if self._wrong == "weight":
            chain = own.gradients.buffer(region.weights[0])
            chain.view(np.uint32)[...] ^= 1
        return self._out(found, self._wrong == "backward")


class FacedHead(Faced):
    def forward(self, region: Any, x: Any, targets: Any, temperature: float, host: Any) -> Any:  # type: ignore[override]
        found = self._op.forward(region, *self._in([x, targets]), temperature, self._host(host))
        values = {name: torch.from_numpy(np.ascontiguousarray(v.view(np.int64) if v.dtype == np.uint64 else v))
                  for name, v in vars(found).items()}  # fmt: skip
        if self._wrong == "forward":
            values["entropy"] = torch.nextafter(values["entropy"], values["entropy"] + 1)
        return Statistics(**values)

    def backward(self, region: Any, x: Any, targets: Any, temperature: float, coefficient: Any, host: Any, kept: Any):  # type: ignore[override]
        dx = self._op.backward(
            region, *self._in([x, targets]), temperature, coefficient.numpy(), self._host(host)
        )  # fmt: skip
        return self._out([dx], self._wrong == "backward")[0]


@dataclass(frozen=True)
class Statistics:
    max: torch.Tensor
    log_sum: torch.Tensor
    logprob: torch.Tensor
    entropy: torch.Tensor
    digest: torch.Tensor


def side(config: ModelConfig, profile: str, dtype: str, tp: int, faults: dict[str, str]) -> tuple[Any, Any, Evidence]:
    """Checked composition, a host, and the evidence."""
    contract = build_contract(config, profile=profile, dtype=dtype, topology=Topology(tp=tp))
    interpreter, evidence, kind = Interpreter(contract), Evidence("test"), DTYPES[dtype]
    ops = {name: Faced(op, kind, faults.get(name, "")) for name, op in reference_ops(interpreter).items()}
    head = FacedHead(ReferenceLinearLogprob(interpreter), kind, faults.get("logprob", ""))
    plain = Composition("exact", ops, head)  # type: ignore[arg-type]
    checked = with_device_first_use_checks(plain, contract, evidence, torch.device("cpu"))
    cos, sin = rope_tables(config, config.max_position)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in LENGTHS])
    starts = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    tokens = torch.arange(ROWS) * 7 % config.vocab_size
    batch = SimpleNamespace(
        tokens=tokens, positions=positions, starts=starts, lengths=LENGTHS, last_position=max(LENGTHS) - 1
    )
    host = SimpleNamespace(
        case="trainer_forward", config=config, tp=tp, batch=batch, weights=Weights(config, kind, tp), state=None,
        cos=torch.from_numpy(cos), sin=torch.from_numpy(sin), gradients=None, row_starts=None,
    )  # fmt: skip
    return checked, host, evidence


def step(config: ModelConfig, profile: str, dtype: str, tp: int = 1, **faults: str) -> Evidence:
    """Forward and backward of every region, through the checks."""
    checked, host, evidence = side(config, profile, dtype, tp, faults)
    definition, generator = define_model(config), torch.Generator().manual_seed(2)
    ports: dict[str, torch.Tensor] = {"tokens": host.batch.tokens}
    saved = {}
    for region in definition.body:
        outputs, saved[region.name] = checked.op(region.kind).forward(region, [ports[n] for n in region.inputs], host)
        ports.update(zip(region.outputs, outputs, strict=True))
    rows, targets = ports["hidden"], torch.arange(ROWS)
    checked.head.forward(definition.head, rows, targets, 0.7, host)
    back = SimpleNamespace(**{**vars(host), "case": "trainer_backward", "gradients": Chains(config)})
    coefficient = torch.linspace(-1, 1, ROWS)
    checked.head.backward(definition.head, rows, targets, 0.7, coefficient, back, None)
    for region in reversed(definition.body):
        grads = [torch.randn(ports[n].shape, generator=generator).to(ports[n].dtype) for n in region.outputs]
        checked.op(region.kind).backward(region, saved[region.name], grads, back)
    return evidence


@pytest.mark.parametrize(
    ("config", "profile", "dtype", "tp"),
    [(MODEL, "portable", "float32", 2), (BIASED, "portable", "bfloat16", 1), (MODEL, "hopper", "bfloat16", 1)],
)
def test_kernels_with_the_contracts_bits_pass(config, profile, dtype, tp):
    checked = step(config, profile, dtype, tp).facts["first_use"]
    kinds = {region.kind for region in define_model(config).regions}
    assert set(checked) == {f"{case}/{kind}" for kind in kinds for case in ("trainer_forward", "trainer_backward")}
    assert all(found["outputs"] > 0 and found["differing"] == 0 for found in checked.values())


@pytest.mark.parametrize("kind", sorted({region.kind for region in define_model(MODEL).regions}))
def test_another_bit_of_a_forward_is_named(kind):
    with pytest.raises(NumericsError, match=rf"\({kind}, trainer_forward\)"):
        step(MODEL, "portable", "float32", **{kind: "forward"})


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *((kind, "backward") for kind in ("rms_norm", "rope", "attention", "swiglu", "o_proj", "qkv_proj", "logprob")),
        *((kind, "weight") for kind in ("embedding", "final_norm", "qk_norm", "gate_up_proj", "down_proj")),
    ],
)
def test_another_bit_of_a_backward_is_named(kind, fault):
    with pytest.raises(NumericsError, match=rf"\({kind}, trainer_backward\)"):
        step(MODEL, "portable", "float32", **{kind: fault})
