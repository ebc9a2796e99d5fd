"""AdamW's moments on a device, or in the host's memory with parts of them on the device while they are updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
Arrays = dict[str, Any]
PART = 1 << 26
"""Elements of a tensor that are on the device at a time: 256 MiB of each moment."""
_SLOTS = 3  # parts on their way in, in use, and on their way out


@dataclass(frozen=True)
class Part:
    """Elements ``first`` .. ``last`` - 1 of a flattened tensor with their moments on the device, changed there."""

    name: str
    first: int
    last: int
    first_moment: Tensor
    second_moment: Tensor


class Moments(Protocol):
    """Both moments of every tensor, float32."""

    def parts(self) -> Iterator[Part]:
        """Every element once, in order of names. What is changed in a part counts when the next one is asked for."""

    def state(self) -> tuple[Arrays, Arrays]:
        """Copies as NumPy arrays by name."""

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """Both moments of a tensor, wherever they lie."""

    def take(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        """Other values."""


class _Kept:
    """Both moments as tensors by name, wherever they lie."""

    def __init__(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
        self._first, self._second = first, second

    def state(self) -> tuple[Arrays, Arrays]:
        """Copies as NumPy arrays by name."""
        return home(self._first), home(self._second)

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """Both moments of a tensor, wherever they lie."""
        return self._first[name], self._second[name]

    def take(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        """Other values."""
        for own, given in ((self._first, first), (self._second, second)):
            for name, tensor in own.items():
                tensor.copy_(torch.from_numpy(given[name]))


class DeviceMoments(_Kept):
    """Where the masters are."""

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        super().__init__(*({name: torch.zeros_like(value) for name, value in masters.items()} for _ in range(2)))

    def parts(self) -> Iterator[Part]:
        """Whole tensors."""
        for name, first in self._first.items():
            yield Part(name, 0, first.numel(), first.view(-1), self._second[name].view(-1))


class HostMoments(_Kept):
    """In the host's memory, page-locked. Parts are copied in, changed, and copied out, side by side; the same bits.

    Args:
        masters: whose names, shapes and device.
        part: most elements of a part.
    """

    def __init__(self, masters: Mapping[str, Tensor], part: int = PART) -> None:
        self._device = next(iter(masters.values())).device
        self._part, locked = part, self._device.type == "cuda"

        def zeros() -> dict[str, Tensor]:
            return {n: torch.zeros(x.shape, dtype=torch.float32, pin_memory=locked) for n, x in masters.items()}

        super().__init__(zeros(), zeros())
        size = min(part, max(x.numel() for x in masters.values()))
        self._slots = [torch.empty((2, size), dtype=torch.float32, device=self._device) for _ in range(_SLOTS)]

    def _ranges(self) -> Iterator[tuple[str, int, int]]:
        for name, value in self._first.items():
            for first in range(0, value.numel(), self._part):
                yield name, first, min(value.numel(), first + self._part)

    def parts(self) -> Iterator[Part]:
        """Parts of every tensor, each in one of three places on the device."""
        inward, outward = (_Stream(self._device) for _ in range(2))
        here = _Current(self._device)
        free: list[Any] = [None] * _SLOTS
        coming: list[tuple[Part, Any]] = []
        ranges = enumerate(self._ranges())

        def fetch() -> None:
            for i, (name, first, last) in ranges:
                slot = self._slots[i % _SLOTS]
                with inward.use():
                    inward.wait(free[i % _SLOTS])
                    for own, place in zip((self._first, self._second), slot, strict=True):
                        place[: last - first].copy_(own[name].view(-1)[first:last], non_blocking=True)
                part = Part(name, first, last, slot[0, : last - first], slot[1, : last - first])
                coming.append((part, inward.event()))
                return

        inward.wait(here.event())  # the places may still be in use
        fetch()
        number = 0
        while coming:
            fetch()
            part, loaded = coming.pop(0)
            here.wait(loaded)
            yield part
            with outward.use():
                outward.wait(here.event())
                for own, place in ((self._first, part.first_moment), (self._second, part.second_moment)):
                    own[part.name].view(-1)[part.first : part.last].copy_(place, non_blocking=True)
            free[number % _SLOTS] = outward.event()
            number += 1
        outward.synchronize()  # whoever reads the host's memory finds it whole


class _Stream:
    """A stream of a GPU; nothing on a CPU, where copies are done when they return."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def use(self) -> Any:
        """Work started inside runs on it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, event: Any) -> None:
        """What comes now runs after an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def event(self) -> Any:
        """After all that was started until now."""
        return None if self._stream is None else self._stream.record_event()

    def synchronize(self) -> None:
        """Wait for all of it."""
        if self._stream is not None:
            self._stream.synchronize()


class _Current(_Stream):
    """The stream on which the caller works."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None


def home(tensors: Mapping[str, Tensor]) -> Arrays:
    """NumPy arrays of their own."""
    return {name: tensor.to("cpu", copy=True).numpy() for name, tensor in tensors.items()}
