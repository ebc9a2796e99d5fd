"""The linear log-probability on a GPU: statistics, sampling and gradient."""

from __future__ import annotations

from dataclasses import fields

import torch

from rlkernel.kernels.triton import launch_sampling
from rlkernel.kernels.triton.launch_logprob import DeviceRowStatistics, best_gemm, linear_logprob
from rlkernel.kernels.triton.launch_logprob_backward import linear_logprob_backward
from rlkernel.kernels.triton.launch_sampling import DeviceSamplingKeys
from rlkernel.models.definition import Region
from rlkernel.ops.device import linear
from rlkernel.ops.device.host import DeviceHost

Tensor = torch.Tensor
_LOGITS = 1 << 28  # elements of float32 logits that exist at a time: 1 GiB


class LinearLogprob:
    """The model's head: statistics of rows, sampling, and their gradient."""

    implementation = "triton.linear_logprob"

    def forward(
        self, region: Region, x: Tensor, targets: Tensor, temperature: float, host: DeviceHost
    ) -> DeviceRowStatistics:
        """Statistics of rows x [R, H] for target ids int64 [R]."""
        return _statistics(x, targets, temperature, host.weights.matrix(region), host)

    def sample(
        self,
        region: Region,
        x: Tensor,
        keys: DeviceSamplingKeys,
        temperature: float,
        host: DeviceHost,
        truncation: bool,
    ) -> tuple[Tensor, DeviceRowStatistics]:
        """Draw one token a row of x [R, H]; ``truncation``: whether a row may have top-k or top-p.

        Logits of some rows are in memory at a time; rows are independent.
        """
        w, points = host.weights.matrix(region), host.points("lm_head")
        step = max(1, _LOGITS // len(w))
        parts = []
        for first in range(0, max(1, len(x)), step):
            rows = x[first : first + step]
            z = linear.forward(points, rows, w, None, torch.float32)
            own = DeviceSamplingKeys(**{f.name: getattr(keys, f.name)[first : first + step] for f in fields(keys)})
            parts.append(launch_sampling.sample(z, temperature, own, host.tp, truncation=truncation))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([tokens for tokens, _ in parts]), joined([found for _, found in parts])

    def backward(
        self,
        region: Region,
        x: Tensor,
        targets: Tensor,
        temperature: float,
        coefficient: Tensor,
        host: DeviceHost,
        statistics: DeviceRowStatistics | None = None,
    ) -> Tensor:
        """d loss / d x from the coefficients float32 [R]; continues the head's weight gradient.

        ``statistics``: of the forward over the same rows; without them they are computed again.
        """
        assert host.gradients is not None
        wgrad = host.points("lm_head.wgrad")
        mac, name = linear.multiply_accumulate(wgrad), region.weights[0]
        w, buffer = host.weights.matrix(region), host.gradients.buffer(name)
        found = statistics or _statistics(x, targets, temperature, w, host)
        starts = (0, len(x)) if host.row_starts is None else host.row_starts
        keep = linear.places_of_whole_steps(wgrad, starts, x.device)
        if keep is None:
            return linear_logprob_backward(
                x, w, found, targets, coefficient, temperature, host.tp, buffer, mac, gemm=best_gemm(x, w, mac)
            )
        # rows between whole steps are zeros with coefficient 0, so that their gradients are zeros
        rows, ids, c = (linear.spread(value, keep) for value in (x, targets, coefficient))
        filled = DeviceRowStatistics(**{f.name: linear.spread(getattr(found, f.name), keep) for f in fields(found)})
        dx = linear_logprob_backward(
            rows, w, filled, ids, c, temperature, host.tp, buffer, mac, gemm=best_gemm(x, w, mac)
        )
        return dx[keep.rows]


def _statistics(x: Tensor, targets: Tensor, temperature: float, w: Tensor, host: DeviceHost) -> DeviceRowStatistics:
    mac = linear.multiply_accumulate(host.points("lm_head"))
    return linear_logprob(x, w, targets, temperature, host.tp, mac, gemm=best_gemm(x, w, mac))


def joined(parts: list[DeviceRowStatistics]) -> DeviceRowStatistics:
    """Statistics of consecutive rows."""
    return DeviceRowStatistics(
        **{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(parts[0])}
    )
