"""The GPU at hand as a device."""

from __future__ import annotations

import torch

from rlkernel.verify.vectors.device import Backend


def gpu_backend() -> Backend | str:
    """A backend of the first GPU, or a sentence that says why there is none."""
    if not torch.cuda.is_available():
        return "this machine has no GPU that torch can use"
    return "no profile runs on this GPU yet"
