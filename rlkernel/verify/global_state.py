"""State of the process that changes how others compute: whoever is called may not leave it changed."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.primitives import rounds_to_nearest_even, subnormals_survive

_TO_NEAREST = 0  # FE_TONEAREST, on x86 and on ARM


@dataclass(frozen=True)
class _Item:
    """One piece of state: its name in a sentence, how it is read, and how it is set."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


@cache
def _mathematics() -> Any:
    return ctypes.CDLL(ctypes.util.find_library("m") or None)


def _set_rounding(nearest: bool) -> None:
    if nearest:
        _mathematics().fesetround(_TO_NEAREST)


def _attribute(owner: Any, name: str, words: str) -> _Item:
    return _Item(words, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None is torch's own way to say the CPU


def _autocast(device: str) -> _Item:
    return _Item(
        f"torch's autocast on {device}",
        lambda: (torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))),
        lambda value: torch.set_autocast_enabled(device, value[0]),
    )


_ITEMS = (
    _Item("whether subnormal numbers are kept", subnormals_survive, lambda kept: torch.set_flush_denormal(not kept)),
    _Item("whether the processor rounds to nearest even", rounds_to_nearest_even, _set_rounding),
    _Item("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Item("torch's default device", torch.get_default_device, _set_device),
    _Item("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _Item("whether torch records gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    _Item("torch's float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Item(
        "torch's deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    _attribute(torch.backends.cuda.matmul, "allow_tf32", "torch.backends.cuda.matmul.allow_tf32"),
    _attribute(torch.backends.cudnn, "allow_tf32", "torch.backends.cudnn.allow_tf32"),
    _attribute(torch.backends.cudnn, "benchmark", "torch.backends.cudnn.benchmark"),
    _attribute(torch.backends.cudnn, "deterministic", "torch.backends.cudnn.deterministic"),
    _attribute(torch.backends.mkldnn, "enabled", "torch.backends.mkldnn.enabled"),
    _autocast("cpu"),
    _autocast("cuda"),
    _Item("NumPy's handling of floating-point errors", np.geterr, lambda value: np.seterr(**value)),
    _Item("the working directory", os.getcwd, os.chdir),
)


class GlobalState:
    """The state as it is now, to be compared with, and put back, later."""

    def __init__(self) -> None:
        self._values = [item.read() for item in _ITEMS]

    def restored(self) -> list[str]:
        """Put back what has changed since; what that was, in words: ``torch's default dtype (torch.float32 before,
        torch.float64 after)``."""
        found = []
        for item, before in zip(_ITEMS, self._values, strict=True):
            after = item.read()
            if after != before:
                found.append(f"{item.name} ({before} before, {after} after)")
                item.write(before)
        return found


def sentence(who: str, changed: list[str]) -> str:
    """What was changed, and why that matters."""
    return f"{who} changes {'; '.join(changed)}: whoever computes after it needs that as it was"


@contextmanager
def kept_state(who: str) -> Iterator[None]:
    """Whatever runs inside leaves the state as it was: it is put back.

    Raises NumericsError if it was changed and nothing else was raised.
    """
    state, changed = GlobalState(), list[str]()
    try:
        yield
    finally:
        changed += state.restored()
    if changed:
        raise NumericsError(sentence(who, changed))
