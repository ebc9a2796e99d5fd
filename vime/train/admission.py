"""What the trainer computes in ``optimizer_step``, as candidates for admission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.bits import Results
from rlkernel.verify.admission.step import CpuAdamW, CpuGradientNorm, StepOp
from vime.train.losses import LossConfig, token_losses


class CpuTokenLosses:
    """The policy loss of :mod:`vime.train.losses`."""

    implementation = "cpu.token_losses"
    sources = ("vime.train.losses",)

    def run(self, arguments: Mapping[str, Any], workers: Workers, bf16: bool) -> Results:
        """Losses of the tokens of a problem; a boolean result is given as uint8."""
        constants = arguments["constants"]
        # bounds that round to exactly the problem's float32 ones
        config = LossConfig(
            policy=constants.policy,
            clip_low=1.0 - constants.low,
            clip_high=constants.high - 1.0,
            kl=constants.kl,
            kl_coefficient=constants.beta,
        )
        found = token_losses(
            config,
            arguments["new"],
            arguments["trained"],
            arguments["advantage"],
            arguments["weight"],
            arguments["old"],
            arguments["reference"],
        )
        return {
            "loss": found.loss,
            "coefficient": found.coefficient,
            "ratio": found.ratio,
            "kl": found.kl,
            "clipped": found.clipped.view(np.uint8),
        }


def step_candidates() -> tuple[tuple[str, StepOp], ...]:
    """Pairs (region, implementation) of the optimizer step."""
    return (("gradient_norm", CpuGradientNorm()), ("adamw", CpuAdamW()), ("loss", CpuTokenLosses()))
