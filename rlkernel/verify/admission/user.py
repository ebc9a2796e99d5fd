"""A user's own kernel as a candidate: plain functions on torch tensors or NumPy arrays, one signature a region."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.errors import ContractError, NumericsError
from rlkernel.kernels.cpu.convert import as_float32, from_float32
from rlkernel.models.definition import Region
from rlkernel.names import hint
from rlkernel.ops.host import Host
from rlkernel.ops.weights import DTYPES
from rlkernel.verify.admission.conduct import Held, Misconduct, Untouched, called
from rlkernel.verify.admission.sources import cpu_toolchain, files_of_function, torch_toolchain
from rlkernel.verify.global_state import GlobalState, kept_state, sentence

Library = Literal["torch", "numpy"]
Array = NDArray[np.float32]

NORMS = ("rms_norm", "final_norm", "qk_norm")
LINEAR = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")

SIGNATURES: dict[str, str] = {
    "embedding": "f(table [V, H], ids int64 [N]) -> [N, H]",
    **dict.fromkeys(NORMS, "f(x [N, H], weight [H], eps) -> y [N, H]"),
    **dict.fromkeys(LINEAR, "f(x [N, K], weight [F, K]) -> y [N, F]; with a bias: f(x, weight, bias [F])"),
    "rope": "f(x [N, heads, D], positions int32 [N], cos [P, D/2], sin [P, D/2]) -> y [N, heads, D]",
    "residual_add": "f(stream [N, H], branch [N, H]) -> [N, H]",
    "swiglu": "f(gate [N, I], up [N, I]) -> [N, I]",
    "attention": "f(q [N, QH, D], k [N, KVH, D], v [N, KVH, D], starts int32 [S + 1]) -> [N, QH, D], causal",
    "logprob": "f(x [N, H], weight [V, H], targets int64 [N], temperature) -> logprob float32 [N]",
}
GRADIENTS: dict[str, str] = {
    "embedding": "f(dh [N, H], ids int64 [N], grad float32 [V, H]) -> grad, continued",
    **dict.fromkeys(NORMS, "f(dy [N, H], x [N, H], weight [H], eps, dw float32 [H]) -> (dx, dw continued)"),
    **dict.fromkeys(
        ("o_proj", "down_proj"), "f(dy [N, F], x [N, K], weight [F, K], dw float32 [F, K]) -> (dx, dw continued)"
    ),
    "rope": "f(dy [N, heads, D], positions int32 [N], cos [P, D/2], sin [P, D/2]) -> dx",
    "swiglu": "f(dy [N, I], gate [N, I], up [N, I]) -> (dgate, dup)",
    "attention": "f(dout [N, QH, D], q, k, v, starts int32 [S + 1]) -> (dq, dk, dv)",
    "logprob": "f(x, weight, targets, temperature, coefficient float32 [N], dw float32 [V, H]) -> (dx, dw continued)",
}


def signature(region: str, case: str) -> str:
    """How a function of a region is called. Raises ContractError for a region (or gradient) that has no signature."""
    known = GRADIENTS if case == "trainer_backward" else SIGNATURES
    if region not in known:
        what = "gradient of a region" if case == "trainer_backward" else "region"
        raise ContractError(
            f"there is no {what} {region!r} for functions; there is {', '.join(sorted(known))}{hint(region, known)}"
        )
    return known[region]


def find_function(name: str) -> Callable[..., Any]:
    """The function ``package.module:function`` or ``FILE.py:function``.

    Raises ContractError where there is none, and NumericsError where importing it changes how others compute.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ContractError(f"{name!r} names no function; package.module:function or FILE.py:function does")
    folder = str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # what lies beside the user's file is found, as `python FILE.py` would find it
    try:
        with kept_state(f"importing {place}"):
            module = _module_of(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ContractError, NumericsError):
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything
        raise ContractError(f"importing {place} raised {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise ContractError(f"{place} has no function {attribute!r}{hint(attribute, names)}")
    return found  # type: ignore[no-any-return]


def _source_files(function: Callable[..., Any]) -> tuple[Path, ...]:
    """The files of a function; of an object that is called, those of its class. Raises ContractError."""
    while isinstance(function, functools.partial):
        function = function.func
    made = any(hasattr(function, name) for name in ("fn", "py_func"))  # by Triton or Numba, of a function
    if inspect.isroutine(function) or inspect.isclass(function) or made:
        return files_of_function(function)
    return files_of_function(type(function))


def _module_of(path: Path) -> Any:
    name = f"admitted_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if not path.is_file() or spec is None or spec.loader is None:
        raise ContractError(f"there is no Python file {path.resolve()}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and decorators look their module up by name
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Statistics:
    """What a function for ``logprob`` gives."""

    logprob: Array


def _with_gaps(x: Any) -> Any:
    """The same values at every other place of a larger memory, whose other places are NaN."""
    shape = (*x.shape[:-1], 2 * x.shape[-1])
    wide = np.full(shape, np.nan, x.dtype) if isinstance(x, np.ndarray) else x.new_full(shape, float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]


def _contiguous(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return bool(x.flags.c_contiguous)
    return x.is_contiguous() if isinstance(x, torch.Tensor) else True


class UserOp:
    """A function as a region's operation.

    Args:
        name: as it was given, ``module:function``.
        case: ``trainer_backward`` for a gradient.
        library: what the function takes and gives. In ``torch`` values have the contract's dtype; NumPy arrays are
            float32 that hold values of it.
        device: of torch tensors.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], region: str, case: str, dtype: str, library: Library, device: str
    ) -> None:
        place, _, attribute = name.rpartition(":")
        self.implementation = f"user.{Path(place).name}:{attribute}"
        self.device = device
        self.source_files = _source_files(function)
        self.toolchain = (*cpu_toolchain(), *torch_toolchain(device))
        self.compared = ("logprob",) if region == "logprob" and case != "trainer_backward" else None
        self._function, self._library, self._device, self._dtype = function, library, device, DTYPES[dtype]
        self._held = Held()
        self._gradient = case == "trainer_backward"
        self._threads = torch.get_num_threads()  # the interpreter runs on one; a function may cut its sums by threads
        signature(region, case)

    def _give(self, values: Any, dtype: torch.dtype | None = None) -> Any:
        """What the function gets: memory of its own with the strides' gaps, if the values have some."""
        if not isinstance(values, np.ndarray):
            return values
        whole = np.ascontiguousarray(values)
        given: Any = whole.copy()
        if self._library == "torch":
            given = torch.from_numpy(given)
            if values.dtype == np.float32:
                given = from_float32(whole, dtype or self._dtype).clone()
            given = given.to(self._device)
        return given if values.flags.c_contiguous else _with_gaps(given)

    def _take(self, value: Any, shape: tuple[int, ...] | None = None) -> Array:
        if isinstance(value, torch.Tensor):
            value = as_float32(value.detach().cpu())
        if not isinstance(value, np.ndarray) or value.dtype != np.float32:
            raise ContractError(
                f"it returned {getattr(value, 'dtype', type(value).__name__)}; "
                "float32 values (or bfloat16 tensors) are needed"
            )
        if shape is not None and value.size != math.prod(shape):
            raise ContractError(
                f"it returned shape {list(value.shape)}, the contract gives {[math.prod(shape[:-1]), shape[-1]]}"
            )
        return np.ascontiguousarray(value if shape is None else value.reshape(shape))

    def _weight(self, host: Host, name: str) -> Any:
        return self._give(as_float32(host.weights.tensors[name]))  # type: ignore[attr-defined]

    def _call(self, *arguments: Any, continues: bool = False) -> Any:
        """Call the function; ``continues``: its last argument is a gradient that it may continue in place.

        Raises Misconduct where it ends the process, writes to an input, or returns memory of that or an earlier result.
        """
        inputs = arguments[:-1] if continues else arguments
        named = {f"its argument {i + 1}": value for i, value in enumerate(inputs)}
        untouched = Untouched(named)
        result = self._called(arguments)
        untouched.confirm()
        self._held.take(result, named)
        return result

    def _called(self, arguments: tuple[Any, ...]) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        state = GlobalState()
        try:
            result = self._raising(arguments)
        finally:
            changed = state.restored()
            torch.set_num_threads(before)
        if changed:
            raise Misconduct(sentence("it", changed))
        return result

    def _raising(self, arguments: tuple[Any, ...]) -> Any:
        try:
            return called(self._function, *arguments)
        except Misconduct:
            raise
        except Exception as error:
            if all(_contiguous(x) for x in arguments):
                raise
            raise ContractError(f"inputs that are not contiguous are refused: {error}") from error

    def forward(self, region: Region, inputs: Any, *rest: Any) -> Any:
        """A region's forward, or the head's (rows, targets, temperature, host)."""
        if region.kind == "logprob":
            return self._logprob(region, inputs, *rest)
        (host,) = rest
        outputs = () if self._gradient else tuple(self._outputs(region, inputs, host))
        return outputs, tuple(inputs)

    def _outputs(self, region: Region, inputs: Sequence[Any], host: Host) -> list[Array]:
        kind = region.kind
        if kind == "embedding":
            return [self._take(self._call(self._weight(host, region.weights[0]), self._give(inputs[0])))]
        if kind in NORMS:
            return [
                self._take(
                    self._call(self._give(x.reshape(-1, x.shape[-1])), self._weight(host, name), self._eps(host)),
                    x.shape,
                )
                for x, name in zip(inputs, region.weights, strict=True)
            ]
        if kind in LINEAR:
            return self._projections(region, inputs[0], host)
        if kind == "rope":
            return [self._take(self._call(self._give(x), *self._places(host))) for x in inputs]
        given = [self._give(x) for x in inputs]
        if kind == "attention":
            given.append(self._give(host.batch.starts))
        return [self._take(self._call(*given))]

    def _projections(self, region: Region, x: Array, host: Host) -> list[Array]:
        rows = x.reshape(len(x), int(np.prod(x.shape[1:])))
        names = [name for name in region.weights if name.endswith(".weight")]
        biases = [name for name in region.weights if name.endswith(".bias")]
        outputs = []
        for i, name in enumerate(names):
            extra = [self._weight(host, biases[i])] if biases else []
            weight = self._weight(host, name)
            y = self._take(self._call(self._give(rows), weight, *extra), (len(rows), weight.shape[0]))
            depth = host.config.head_dim
            outputs.append(y.reshape(len(y), y.shape[1] // depth, depth) if region.kind == "qkv_proj" else y)
        return outputs

    @staticmethod
    def _eps(host: Host) -> float:
        return float(np.float32(host.config.rms_norm_eps))

    def _places(self, host: Host) -> tuple[Any, Any, Any]:
        tables = [self._give(x, torch.float32) for x in (host.rope.cos, host.rope.sin)]
        return self._give(host.batch.positions), tables[0], tables[1]

    def _logprob(self, region: Region, x: Array, targets: Any, temperature: float, host: Host) -> Statistics:
        weight = self._weight(host, region.weights[0])
        return Statistics(self._take(self._call(self._give(x), weight, self._give(targets), temperature)))

    def backward(self, region: Region, saved: Any, grads: Any, *rest: Any) -> Any:
        """A region's backward, or the head's (rows, targets, temperature, coefficient, host)."""
        if region.kind == "logprob":
            return self._head_gradient(region, saved, grads, *rest)
        (host,) = rest
        kind = region.kind
        if kind == "embedding":
            buffer = host.gradients.embedding(region.weights[0])
            buffer[:] = self._take(
                self._call(
                    self._give(grads[0]), self._give(saved[0]), self._give(buffer, torch.float32), continues=True
                )
            )
            return ()
        if kind in NORMS:
            return tuple(self._norm_gradient(host, *each) for each in zip(grads, saved, region.weights, strict=True))
        if kind in LINEAR:
            return (self._projection_gradient(region, saved[0], grads[0], host),)
        if kind == "rope":
            return tuple(self._take(self._call(self._give(g), *self._places(host))) for g in grads)
        given = [self._give(grads[0]), *(self._give(x) for x in saved)]
        if kind == "attention":
            given.append(self._give(host.batch.starts))
        return tuple(self._take(x) for x in self._call(*given))

    def _norm_gradient(self, host: Host, dy: Array, x: Array, name: str) -> Array:
        assert host.gradients is not None
        buffer, flat = host.gradients.buffer(name), (-1, x.shape[-1])
        dx, dw = self._call(
            self._give(dy.reshape(flat)), self._give(x.reshape(flat)), self._weight(host, name), self._eps(host),
            self._give(buffer, torch.float32), continues=True,
        )  # fmt: skip
        buffer[:] = self._take(dw)
        return self._take(dx, x.shape)

    def _projection_gradient(self, region: Region, x: Array, dy: Array, host: Host) -> Array:
        assert host.gradients is not None
        name = region.weights[0]
        buffer = host.gradients.buffer(name)
        rows = x.reshape(len(x), int(np.prod(x.shape[1:])))
        dx, dw = self._call(
            self._give(dy), self._give(rows), self._weight(host, name), self._give(buffer, torch.float32),
            continues=True,
        )  # fmt: skip
        buffer[:] = self._take(dw)
        return self._take(dx, x.shape)

    def _head_gradient(
        self, region: Region, x: Array, targets: Any, temperature: float, coefficient: Array, host: Host
    ) -> Array:
        assert host.gradients is not None
        buffer = host.gradients.buffer(region.weights[0])
        dx, dw = self._call(
            self._give(x), self._weight(host, region.weights[0]), self._give(targets), temperature,
            self._give(coefficient, torch.float32), self._give(buffer, torch.float32), continues=True,
        )  # fmt: skip
        buffer[:] = self._take(dw)
        return self._take(dx)
