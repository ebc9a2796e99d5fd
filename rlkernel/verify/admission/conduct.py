"""What a kernel may not do beside giving other bits: end the process, write to its inputs, give its memory twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from rlkernel.errors import RlkernelError
from rlkernel.verify.admission.problem import Problem

_HELD_BYTES = 64 * 2**20
_HELD_CALLS = 16


class Misconduct(RlkernelError):
    """A kernel did something that would harm its caller, whatever bits it gave. The message begins with 'it'."""


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a kernel; whatever it raises to end the process is a failure of its own.

    Raises Misconduct for every BaseException that is no Exception, save KeyboardInterrupt, which is the user's.
    """
    try:
        return function(*arguments)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, or one of the user's own
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise Misconduct(f"it raised {said}, which is no Exception: it would have ended the process") from error


class Untouched:
    """Copies of arrays and tensors by name, to be compared with after a kernel was called with them."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = {name: value for name, value in named.items() if isinstance(value, (np.ndarray, torch.Tensor))}
        self._before = {name: _content(value) for name, value in self._named.items()}

    def confirm(self) -> None:
        """Raises Misconduct naming the first input of which a bit changed."""
        for name, value in self._named.items():
            if _content(value) != self._before[name]:
                raise Misconduct(f"it writes to {name}, which its caller needs as it was")


def inputs_by_name(problem: Problem) -> dict[str, Any]:
    """Everything of a problem that an implementation may read, and may not write to."""
    named: dict[str, Any] = {f"its input {i}": value for i, value in enumerate(problem.inputs)}
    named.update({f"its gradient {i}": value for i, value in enumerate(problem.grads)})
    chosen = problem.region.weights
    named.update({name: tensor for name, tensor in problem.tensors.items() if name in chosen})
    if problem.head is not None:
        named["its targets"], named["its coefficients"] = problem.head.targets, problem.head.coefficient
    return named


class Held:
    """Results of the last calls, kept alive: no later call may give memory that one of them lies in."""

    def __init__(self) -> None:
        self._calls: deque[tuple[list[Any], int]] = deque()

    def take(self, result: Any, inputs: Mapping[str, Any] | None = None) -> None:
        """Keep a call's result. Raises Misconduct where it lies in the memory of an earlier one, or of an input."""
        parts = result if isinstance(result, (tuple, list)) else [result]
        arrays = [part for part in parts if isinstance(part, (np.ndarray, torch.Tensor))]
        given = [(name, region) for name, value in (inputs or {}).items() for region in _regions([value])]
        for place, start, end in _regions(arrays):
            for name, (other, first, last) in given:
                if place == other and start < last and first < end:
                    raise Misconduct(f"it returns memory of {name}: whoever changes one of them alters the other")
        earlier = [region for kept, _ in self._calls for region in _regions(kept)]
        for place, start, end in _regions(arrays):
            if any(place == other and start < last and first < end for other, first, last in earlier):
                raise Misconduct("it returns memory that an earlier call returned: a later call alters that result")
        self._calls.append((arrays, sum(array.nbytes for array in arrays)))
        while len(self._calls) > _HELD_CALLS or (
            len(self._calls) > 1 and sum(count for _, count in self._calls) > _HELD_BYTES
        ):
            self._calls.popleft()


def _content(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    flat = value.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).cpu().numpy().tobytes()) if flat.numel() else b""


def _regions(arrays: list[Any]) -> Iterator[tuple[str, int, int]]:
    """Device and addresses of the elements of every array that has some."""
    for array in arrays:
        if not isinstance(array, (np.ndarray, torch.Tensor)):
            continue
        if isinstance(array, np.ndarray):
            if array.size:
                yield ("cpu", *byte_bounds(array))
        elif array.numel() and array.layout == torch.strided:
            span = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True)) + 1
            yield str(array.device), array.data_ptr(), array.data_ptr() + span * array.element_size()
