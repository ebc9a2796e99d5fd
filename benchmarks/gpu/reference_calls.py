"""The contract's interpreter called region by region on tensors of a device: what the bits of a kernel are held to."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlkernel.contract.build import Contract, build_contract
from rlkernel.contract.claims import Topology
from rlkernel.models.config import ModelConfig
from rlkernel.reference.regions import Interpreter, reference_ops

EPS = 1e-6


def contract(profile: str, dtype: str, tp: int = 1, *, bias: bool = False) -> Contract:
    """A dense model's contract; its width stands for any (the entries hold no width but that of lanes)."""
    config = ModelConfig(
        family="qwen3" if not bias else "qwen2",
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=2048,
        num_layers=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=64,
        rms_norm_eps=EPS,
        qk_norm=not bias,
        qkv_bias=bias,
    )
    return build_contract(config, profile=profile, dtype=dtype, topology=Topology(tp=tp))


@dataclass
class _Gradients:
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def buffer(self, name: str) -> np.ndarray[Any, Any]:
        return self.arrays[name]

    embedding = buffer


class Reference:
    """Runs region kinds of one contract on ``device``; tensors go in and come out in float32 (values of the dtype)."""

    def __init__(self, found: Contract, device: str) -> None:
        self.contract, self.device = found, device
        self._ops = reference_ops(Interpreter(found, device))

    def _host(
        self, case: str, weights: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], **rest: Any
    ) -> Any:
        return SimpleNamespace(
            case=case,
            weights=SimpleNamespace(tensors={name: w.detach().cpu() for name, w in weights.items()}),
            gradients=_Gradients({name: g.detach().cpu().numpy().copy() for name, g in gradients.items()}),
            config=self.contract.config,
            tp=self.contract.topology.tp,
            state=None,
            **rest,
        )

    @staticmethod
    def _array(x: torch.Tensor) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = (x.float() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy()
        return found

    def _tensors(self, arrays: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(a)).to(self.device) for a in arrays]

    def forward(
        self, kind: str, inputs: list[torch.Tensor], weights: dict[str, torch.Tensor] | None = None, **rest: Any
    ) -> list[torch.Tensor]:
        """Outputs of a region kind in ``trainer_forward``."""
        outputs, _ = self._run(kind, inputs, weights or {}, rest)
        return self._tensors(outputs)

    def _run(self, kind: str, inputs: list[torch.Tensor], weights: dict[str, torch.Tensor], rest: Any) -> Any:
        region = SimpleNamespace(kind=kind, weights=tuple(weights), name=kind, layer=0)
        host = self._host("trainer_forward", weights, {}, **rest)
        return self._ops[kind].forward(region, [self._array(x) for x in inputs], host)

    def backward(
        self,
        kind: str,
        inputs: list[torch.Tensor],
        grads: list[torch.Tensor],
        weights: dict[str, torch.Tensor] | None = None,
        gradients: dict[str, torch.Tensor] | None = None,
        **rest: Any,
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Gradients of the inputs, and the continued gradients of the weights."""
        weights = weights or {}
        _, saved = self._run(kind, inputs, weights, rest)
        region = SimpleNamespace(kind=kind, weights=tuple(weights), name=kind, layer=0)
        host = self._host("trainer_backward", weights, gradients or {}, **rest)
        found = self._ops[kind].backward(region, saved, [self._array(g) for g in grads], host)
        running = {name: torch.from_numpy(g).to(self.device) for name, g in host.gradients.arrays.items()}
        return self._tensors(found), running
