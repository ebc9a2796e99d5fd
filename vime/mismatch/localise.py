"""Where two evaluations of one sequence part: the first region boundary whose bits differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlkernel.ops.host import TokenBatch
from vime.train.batching import flatten
from vime.train.interface import TrainSample

_LAYER = re.compile(r"layers?\.(\d+)\b")


@dataclass(frozen=True)
class Boundary:
    """One output of one region. ``values`` has the tokens as its first axis."""

    region: str
    output: str
    values: NDArray[Any]


@dataclass
class TraceRecorder:
    """A trace callback that keeps copies: ``runner.trace = recorder``; then run one sequence."""

    boundaries: list[Boundary] = field(default_factory=list)

    def __call__(self, region: str, output: str, values: Any) -> None:
        """Keep one boundary; tensors of torch come as float32."""
        if not isinstance(values, np.ndarray):
            values = values.detach().to("cpu").float().numpy()
        self.boundaries.append(Boundary(region, output, np.array(values, copy=True)))


@dataclass(frozen=True)
class Divergence:
    """The first difference of two traces.

    ``kind``: ``values`` (bits differ), ``shape``, ``structure`` (the sides have other regions at this place) or
    ``length`` (one side has no more boundaries). ``token`` and ``element`` index the boundary's first axis and the
    flattened rest; ``left`` and ``right`` are bit patterns, or descriptions for the other kinds.
    """

    kind: Literal["values", "shape", "structure", "length"]
    index: int  # of the boundary, in execution order
    region: str
    output: str
    layer: int | None
    token: int | None
    element: int | None
    left: str
    right: str
    differing: int  # elements of this boundary that differ
    total: int

    def sentence(self) -> str:
        """What a person reads."""
        where = f"{self.region} ({self.output}), boundary {self.index}"
        if self.kind != "values":
            return f"the two sides part at {where}: {self.kind} differs, {self.left} against {self.right}"
        return (
            f"the first differing boundary is {where}: {self.differing} of {self.total} elements differ, first at "
            f"token {self.token}, element {self.element}: bits {self.left} against {self.right}"
        )


def bits(values: NDArray[Any]) -> NDArray[Any]:
    """Values as unsigned integers of their width, every NaN of a float32 or float64 as one pattern."""
    values = np.ascontiguousarray(values)
    unsigned = values.view(np.dtype(f"u{values.dtype.itemsize}"))
    if values.dtype.kind != "f":
        return unsigned
    quiet = np.array([np.nan], dtype=values.dtype).view(unsigned.dtype)[0]
    return np.where(np.isnan(values), quiet, unsigned)


def first_divergence(left: list[Boundary], right: list[Boundary]) -> Divergence | None:
    """Compare two traces of the same sequence in execution order; None when all bits are equal.

    An empty trace on both sides is not equality: ValueError.
    """
    if not left and not right:
        raise ValueError("both traces are empty: nothing was compared, so nothing can be said")
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if (a.region, a.output) != (b.region, b.output):
            return _other("structure", index, a, f"{a.region}.{a.output}", f"{b.region}.{b.output}")
        if a.values.shape != b.values.shape or a.values.dtype != b.values.dtype:
            return _other("shape", index, a, *(f"{x.values.dtype}{list(x.values.shape)}" for x in (a, b)))
        found = _values(index, a, b)
        if found is not None:
            return found
    if len(left) != len(right):
        longer = left if len(left) > len(right) else right
        at = min(len(left), len(right))
        return _other("length", at, longer[at], f"{len(left)} boundaries", f"{len(right)} boundaries")
    return None


def localise(
    run_left: Callable[[TraceRecorder], None], run_right: Callable[[TraceRecorder], None]
) -> Divergence | None:
    """Trace the same sequence on both sides and compare. Each function runs one side with the recorder as its trace."""
    left, right = TraceRecorder(), TraceRecorder()
    run_left(left)
    run_right(right)
    return first_divergence(left.boundaries, right.boundaries)


def trace_sample(model: Any, sample: TrainSample, temperature: float, case: str) -> list[Boundary]:
    """Every boundary of one forward over a whole sequence, the head's included; a boundary's token is the position.

    ``model`` is a model runner (``hidden``, ``logprobs``, ``trace``); its trace is put back afterwards.
    """
    recorder, before = TraceRecorder(), model.trace
    flat = flatten([sample])
    model.trace = recorder
    try:
        hidden = model.hidden(TokenBatch(flat.tokens, flat.positions, flat.starts), None, case)
    finally:
        model.trace = before
    following = np.append(flat.tokens[1:], flat.targets[-1])
    found = model.logprobs(hidden, following, temperature, case)
    for output, values in (("logits", found.digest), ("log_sum", found.log_sum), ("logprob", found.logprob)):
        recorder("logprob", output, values)
    return recorder.boundaries


def _values(index: int, a: Boundary, b: Boundary) -> Divergence | None:
    left, right = bits(a.values).ravel(), bits(b.values).ravel()
    wrong = np.flatnonzero(left != right)
    if not len(wrong):
        return None
    at = int(wrong[0])
    row = max(1, int(np.prod(a.values.shape[1:])))
    width = 2 * a.values.dtype.itemsize
    return Divergence(
        "values", index, a.region, a.output, _layer(a.region), at // row, at % row,
        f"{int(left[at]):0{width}x}", f"{int(right[at]):0{width}x}", len(wrong), left.size,
    )  # fmt: skip


def _other(
    kind: Literal["shape", "structure", "length"], index: int, at: Boundary, left: str, right: str
) -> Divergence:
    return Divergence(kind, index, at.region, at.output, _layer(at.region), None, None, left, right, 0, at.values.size)


def _layer(region: str) -> int | None:
    match = _LAYER.search(region)
    return int(match.group(1)) if match else None
