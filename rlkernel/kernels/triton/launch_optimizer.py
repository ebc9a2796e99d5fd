"""Starts the kernels of the optimizer: gradient norm, clipping factor, AdamW. Nothing waits for the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
import triton

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.optimizer import SQUARES_LEAF, AdamWScalars
from rlkernel.kernels.triton import optimizer as kernels
from rlkernel.kernels.triton.launch import _options, lanes
from rlkernel.kernels.triton.launch_rows import DTYPES, _require

_TREE = 1024  # values that one program merges; a factor of every tree, so the cut is not seen


def sum_of_squares(g: torch.Tensor, out: torch.Tensor) -> None:
    """Sum of squares of a float32 tensor over leaves of 1,024 elements, into ``out``, float32 [1]; +0 for none.

    Raises:
        ContractError: dtypes or layouts that do not fit.
    """
    _require("g of sum_of_squares", g, tuple(g.shape), (torch.float32,))
    _require("out of sum_of_squares", out, (1,), (torch.float32,))
    count = g.numel()
    if not count:
        out.zero_()
        return
    values = torch.empty(-(-count // SQUARES_LEAF), dtype=torch.float32, device=g.device)
    whole, rest = divmod(count, SQUARES_LEAF)
    if whole:
        rows = 4
        kernels.square_leaves[(triton.cdiv(whole, rows),)](
            g, values, count, LEAF=SQUARES_LEAF, LANES=lanes(SQUARES_LEAF), ROWS=rows, num_warps=4, **_options()
        )
    if rest:
        kernels.square_rest[(1,)](
            g, values[whole:], whole * SQUARES_LEAF, N=rest, LANES=lanes(rest), num_warps=4, **_options()
        )
    while True:
        blocks = triton.cdiv(len(values), _TREE)
        merged = out if blocks == 1 else torch.empty(blocks, dtype=torch.float32, device=g.device)
        kernels.tree_level[(blocks,)](values, merged, len(values), WIDTH=_TREE, num_warps=4, **_options())
        if blocks == 1:
            return
        values = merged


def gradient_norm(gradients: Mapping[str, torch.Tensor], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm over tensors added ascending by name (code points), and the clipping factor; float32 [1] each.

    Args:
        max_norm: rounded once to float32; positive, infinity for no clipping.

    Raises:
        ContractError: no tensor, ``max_norm`` not positive, or dtypes or layouts that do not fit.
    """
    limit = torch.tensor(max_norm, dtype=torch.float32)
    if not bool(limit > 0):
        raise ContractError(f"max_norm is {max_norm}; it must be positive in float32 (infinity for no clipping)")
    if not gradients:
        raise ContractError("gradient_norm without a gradient; at least one tensor is expected")
    names = sorted(gradients)
    device = gradients[names[0]].device
    totals = torch.empty(len(names), dtype=torch.float32, device=device)
    for i, name in enumerate(names):
        sum_of_squares(gradients[name], totals[i : i + 1])
    norm, clip = (torch.empty(1, dtype=torch.float32, device=device) for _ in range(2))
    kernels.norm_and_clip[(1,)](totals, norm, clip, len(names), float(limit), num_warps=1, **_options())
    return norm, clip


def scalars_on_device(scalars: AdamWScalars, device: torch.device) -> torch.Tensor:
    """The scalars of a step but for its clipping factor, float32 [9], as :func:`adamw` takes them."""
    values = [float(getattr(scalars, f.name)) for f in fields(scalars) if f.name != "clip"]
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def adamw(
    master: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    scalars: torch.Tensor,
    clip: torch.Tensor,
) -> None:
    """One AdamW step of a tensor in place: ``master``, ``m``, ``v`` (float32), the model's ``weight`` = cast(master).

    Args:
        grad: float32, before clipping; ``clip``: float32 [1], the factor; ``scalars``: of :func:`scalars_on_device`.

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    for name, x in (("master", master), ("m", m), ("v", v), ("grad", grad)):
        _require(f"{name} of adamw", x, tuple(master.shape), (torch.float32,))
    _require("weight of adamw", weight, tuple(master.shape), DTYPES)
    _require("scalars of adamw", scalars, (9,), (torch.float32,))
    _require("clip of adamw", clip, (1,), (torch.float32,))
    if master.numel():
        grid = (triton.cdiv(master.numel(), 1024),)
        kernels.adamw[grid](
            master, m, v, grad, weight, scalars, clip, master.numel(), BLOCK=1024, num_warps=4, **_options()
        )
