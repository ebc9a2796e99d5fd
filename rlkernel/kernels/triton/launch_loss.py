"""Starts the kernel of the policy loss."""

from __future__ import annotations

import torch
import triton

from rlkernel.errors import ContractError
from rlkernel.kernels.triton.launch import _options
from rlkernel.kernels.triton.launch_rows import _require
from rlkernel.kernels.triton.loss import token_loss as kernel
from rlkernel.reference.loss import KL_TERMS, POLICIES, LossConstants, LossInputs


def token_losses(constants: LossConstants, inputs: LossInputs) -> dict[str, torch.Tensor]:
    """``loss``, ``coefficient`` (d loss / d logprob), ``ratio``, ``kl`` (float32 [T]) and ``clipped`` (bool [T]).

    Raises:
        ContractError: a loss or a KL term that is not defined; tensors that are not [T] of one GPU, float32 and bool.
    """
    if constants.policy not in POLICIES or constants.kl not in KL_TERMS:
        raise ContractError(f"the loss {constants.policy!r} with KL term {constants.kl!r} is not defined")
    shape = (inputs.new.numel(),)
    for name in ("new", "old", "reference", "advantage", "weight"):
        _require(f"{name} of the loss", getattr(inputs, name), shape, (torch.float32,))
    _require("trained of the loss", inputs.trained, shape, (torch.bool,))
    loss, coefficient, ratio, kl = (torch.empty_like(inputs.new) for _ in range(4))
    clipped = torch.empty(shape, dtype=torch.int8, device=inputs.new.device)
    if shape[0]:
        kernel[(triton.cdiv(shape[0], 256),)](
            inputs.new, inputs.old, inputs.reference, inputs.advantage, inputs.weight, inputs.trained.view(torch.int8),
            loss, coefficient, ratio, kl, clipped, shape[0], constants.low, constants.high, constants.beta,
            CLIPS=constants.policy == "ppo_clip", KL=KL_TERMS.index(constants.kl), BLOCK=256, num_warps=4, **_options(),
        )  # fmt: skip
    return {"loss": loss, "coefficient": coefficient, "ratio": ratio, "kl": kl, "clipped": clipped.view(torch.bool)}
