"""The optimizer step on a GPU, as computations with named results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlkernel.kernels.triton import launch_optimizer
from rlkernel.verify.admission.bits import Results


def _on(device: torch.device, value: Any) -> torch.Tensor:
    return torch.from_numpy(value).clone().to(device)


class GradientNorm:
    """Norm over all tensors, and the factor of clipping."""

    implementation = "triton.gradient_norm"

    def run(self, arguments: Mapping[str, Any], device: torch.device, bf16: bool) -> Results:
        """``norm`` and ``clip``, each [1]."""
        gradients = {name: _on(device, value) for name, value in arguments["gradients"].items()}
        norm, clip = launch_optimizer.gradient_norm(gradients, arguments["max_norm"])
        return {"norm": norm.cpu().numpy(), "clip": clip.cpu().numpy()}


class AdamW:
    """One update of a tensor."""

    implementation = "triton.adamw"

    def run(self, arguments: Mapping[str, Any], device: torch.device, bf16: bool) -> Results:
        """``master``, ``m``, ``v`` and the model's ``weight``."""
        master, m, v = (_on(device, arguments[name]) for name in ("master", "m", "v"))
        weight = torch.empty_like(master, dtype=torch.bfloat16 if bf16 else torch.float32)
        given = arguments["scalars"]
        clip = torch.tensor([float(given.clip)], dtype=torch.float32, device=device)
        scalars = launch_optimizer.scalars_on_device(given, device)
        launch_optimizer.adamw(master, m, v, _on(device, arguments["gradient"]), weight, scalars, clip)
        found = {"master": master, "m": m, "v": v, "weight": weight.float()}
        return {name: value.cpu().numpy() for name, value in found.items()}


def step_ops() -> dict[str, Any]:
    """One implementation a computation of the optimizer step that has a kernel."""
    return {"gradient_norm": GradientNorm(), "adamw": AdamW()}
