"""What can be probed: a reduction with ``n`` inputs, seen through one interface whatever its call looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlkernel.errors import ContractError, NumericsError
from rlkernel.verify.discovery.formats import FORMATS, Array, Float64, Format, number_format

Call = Callable[[Array, Array | None], Array]


@dataclass(frozen=True)
class Trial:
    """One random input of a target: first operands [rows, n], second ones as the target takes them (None for a sum)."""

    a: Array
    b: Array | None


@dataclass(frozen=True)
class Target:
    """A reduction over ``n`` inputs that one call computes for ``rows`` x ``columns`` outputs.

    ``call(a, b)`` takes carriers (see ``formats``) and returns carriers [rows, columns]: a [rows, n] are summands where
    ``operands`` is 1 (b is None); where it is 2, a and b [n, columns] are the factors of the products that are added.
    ``displaced`` is the same call with inputs that lie elsewhere in memory, relative to a multiple of 64 bytes.
    """

    name: str
    n: int
    call: Call
    rows: int = 1
    columns: int = 1
    operands: int = 1
    dtype: str = "float32"
    output: str = "float32"
    displaced: Call | None = None

    noise = 0.0
    """By how much a sum that is read back from an output may be off, where the output is not the sum itself."""
    columns_alike = True
    """Whether outputs of one row and different columns are equal where the operands are."""

    def __post_init__(self) -> None:
        number_format(self.dtype)
        number_format(self.output)
        for name in ("n", "rows", "columns"):
            if getattr(self, name) < 1:
                raise ContractError(f"{self.name} has {name} = {getattr(self, name)}; at least 1 is needed")

    @property
    def positive(self) -> bool:
        """Whether only sums of values that are not negative can be formed: then probes use no -M."""
        return isinstance(self, PositiveTarget)

    @property
    def input_format(self) -> Format:
        """Format of the operands."""
        return number_format(self.dtype)

    @property
    def range_format(self) -> Format:
        """Of operands and outputs, the format with the narrower range: what is probed must not leave it."""
        return max(number_format(self.dtype), number_format(self.output), key=lambda form: form.smallest_exponent)

    def outputs(self, trial: Trial, *, displaced: bool = False) -> Array:
        """Carriers [rows, columns] of one call.

        Raises:
            ContractError: the call raised, or returned another shape or dtype.
            NumericsError: it changed how others compute.
        """
        try:
            call = self.displaced if displaced and self.displaced is not None else self.call
            result = np.asarray(call(trial.a, trial.b))
        except (KeyboardInterrupt, NumericsError):
            raise
        except _Unusable as error:
            raise ContractError(f"{self.name} {error}") from None
        except BaseException as error:  # a user's function may raise anything, SystemExit too
            raise ContractError(f"{self.name} raised {type(error).__name__}: {error}") from error
        if result.size != self.rows * self.columns:
            raise ContractError(
                f"{self.name} returned an array of shape {list(result.shape)} for {self.rows} rows of {self.n} inputs; "
                f"{self.rows} x {self.columns} outputs were expected"
            )
        return result.reshape(self.rows, self.columns).astype(number_format(self.output).carrier, copy=False)

    def sums(self, terms: Float64, factor: float = 1.0) -> Float64:
        """The sums of given terms: terms [rows, n] times the same factor for every input -> float64 [rows, columns]."""
        carrier = self.input_format.carrier
        b = None if self.operands == 1 else np.full((self.n, self.columns), factor, dtype=carrier)
        return self.outputs(Trial(terms.astype(carrier), b)).astype(np.float64)

    def alike(self, row: Array, column: Array | None) -> Trial:
        """An input in which every output has the same operands: row [n] and column [n]."""
        a = np.ascontiguousarray(np.broadcast_to(row, (self.rows, self.n)))
        if column is None:
            return Trial(a, None)
        return Trial(a, np.ascontiguousarray(np.broadcast_to(column[:, None], (self.n, self.columns))))

    def trial(self, draw: Callable[[int], Array]) -> Trial:
        """An input whose rows and columns all differ; ``draw(m)`` gives m random vectors [m, n]."""
        a = draw(self.rows)
        return Trial(a, None if self.operands == 1 else np.ascontiguousarray(draw(self.columns).T))

    def operands_at(self, trial: Trial, rows: Array, columns: Array) -> tuple[Array, Array | None]:
        """Operands of P outputs, each [P, n]."""
        return trial.a[rows], None if trial.b is None else trial.b[:, columns].T

    def finish(self, sums: Array, trial: Trial, rows: Array, columns: Array) -> Array:
        """Outputs [P] that follow from the sums [P]; here the sums themselves."""
        return sums


class PositiveTarget(Target):
    """A reduction whose terms cannot be negative: squares, exponentials. Terms follow from operands [rows, n]."""

    zero = 0.0
    """Operand whose term is +0."""
    large = 1.0
    """Operand whose term is 1."""
    small = 2.0**-12
    """Operand whose term is at most 2^-24, and twice that is more: lost beside 1, unless it meets another first."""
    squares = True
    """Whether a term is the square of its operand."""

    def exceeds(self, operands: Float64, base: float) -> npt.NDArray[np.bool_]:
        """Whether the sum of each row, which is ``base`` (a float32, 1 or a little more) or above, is above: [rows]."""
        raise NotImplementedError


def function_target(
    function: Callable[..., Any],
    name: str,
    *,
    n: int,
    rows: int | None = None,
    columns: int | None = None,
    operands: int = 1,
    dtype: str = "float32",
    output: str | None = None,
    library: str = "numpy",
    device: str = "cpu",
    transposed: bool = False,
    arguments: dict[str, Any] | None = None,
) -> Target:
    """A target from a plain function.

    Args:
        function: of one array (a sum: [n], or [rows, n] reduced over its last axis) or of two (products: [n] and [n],
            or matrices [rows, n] and [n, columns]).
        name: for messages.
        n: inputs that are reduced.
        rows, columns: None for vectors.
        dtype: of the inputs.
        output: of the result; that of the inputs without it.
        library: ``numpy`` or ``torch``: what the function takes.
        device: of torch tensors.
        transposed: the second matrix is given as [columns, n], as linear layers take it.
        arguments: more keyword arguments.

    Raises:
        ContractError: a combination that does not exist, or a device that torch does not have.
    """
    number_format(dtype)
    named = arguments or {}
    if library == "numpy" and (device != "cpu" or dtype == "bfloat16"):
        raise ContractError(f"NumPy has no {'bfloat16' if device == 'cpu' else 'device ' + device}; use torch")
    convert = _numpy_conversion(dtype) if library == "numpy" else _torch_conversion(dtype, device)

    def at(offset: int) -> Call:
        def call(a: Array, b: Array | None) -> Array:
            first = convert(a if rows is not None else a[0], offset)
            if b is None:
                return _carriers(function(first, **named), output or dtype)
            second = b[:, 0] if columns is None else b.T if transposed else b
            return _carriers(function(first, convert(second, offset), **named), output or dtype)

        return call

    return Target(name, n, at(0), rows or 1, columns or 1, operands, dtype, output or dtype, displaced=at(1))


Conversion = Callable[[Array, int], Any]


def _numpy_conversion(dtype: str) -> Conversion:
    """Copies to memory that starts so many elements after a multiple of 64 bytes: some libraries look at that."""
    kind = np.dtype(dtype)

    def convert(array: Array, offset: int) -> Any:
        size = array.size * kind.itemsize
        memory = np.empty(size + 128, dtype=np.uint8)
        start = -memory.ctypes.data % 64 + offset * kind.itemsize
        placed = memory[start : start + size].view(kind).reshape(array.shape)
        placed[...] = array
        return placed

    return convert


def _torch_conversion(dtype: str, device: str) -> Conversion:
    kind = getattr(torch, dtype)
    try:
        torch.empty(1, dtype=kind, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ContractError(f"torch cannot use the device {device!r}: {str(error).splitlines()[0]}") from error

    def convert(array: Array, offset: int) -> Any:
        placed = torch.empty(array.size + offset, dtype=kind, device=device)[offset:].view(array.shape)
        source = np.ascontiguousarray(array)
        return placed.copy_(torch.from_numpy(source if source.flags.writeable else source.copy()))

    return convert


class _Unusable(Exception):
    """What a function returned is no output; the message begins with a verb."""


def _carriers(value: Any, output: str) -> Array:
    """Carriers of what a function returned: an array or tensor of the output's dtype, or Python's own floats.

    Nothing is rounded here: raises _Unusable for another dtype, and for floats that the output's format does not hold.
    """
    if isinstance(value, torch.Tensor):
        given = str(value.dtype).removeprefix("torch.")
        if given == output:
            wide = value.detach().to(torch.float64 if value.dtype == torch.float64 else torch.float32)
            result: Array = wide.cpu().numpy()
            return result
    elif isinstance(value, (np.ndarray, np.generic)):
        given = value.dtype.name
        if given == output:
            return np.asarray(value).astype(number_format(output).carrier)
    else:
        return _from_python(value, output)
    if given in FORMATS:
        raise _Unusable(f"returns {given} where {output} is expected; if that is meant, give --output {given}")
    raise _Unusable(f"returns {given}; a sum of floating-point numbers returns {output}")


def _from_python(value: Any, output: str) -> Array:
    parts = value if isinstance(value, (list, tuple)) else [value]
    if value is None:
        raise _Unusable(f"returns None; its sum, {output}, is needed (does it lack a return?)")
    for part in parts:
        if isinstance(part, (torch.Tensor, np.ndarray, np.generic)):
            continue
        if type(part) is not float:
            raise _Unusable(f"returns {type(part).__name__}; its sum, {output}, is needed")
        rounded = float(number_format(output).round(np.array([part]))[0])
        if rounded != part and part == part:
            raise _Unusable(
                f"returns {part!r}, which {output} does not hold; if Python's float64 is meant, give --output float64"
            )
    carrier = number_format(output).carrier
    return np.array([p if type(p) is float else _carriers(p, output) for p in parts], dtype=carrier)
