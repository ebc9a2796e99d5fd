"""Finds a reduction by name and shape: functions of torch and NumPy, kernels of this package, a user's function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlkernel.errors import ContractError
from rlkernel.names import hint
from rlkernel.verify.discovery.kernels import KERNELS, kernel_target
from rlkernel.verify.discovery.targets import Target, function_target
from rlkernel.verify.global_state import kept_state

_LIBRARIES = ("torch", "numpy")
_LAST_AXIS = {"torch": "dim", "numpy": "axis"}
_DOTS = ("torch.dot", "torch.inner", "torch.vdot", "numpy.dot", "numpy.inner", "numpy.vdot")
_LINEAR = ("torch.nn.functional.linear", "torch._C._nn.linear")


def parse_shape(text: str) -> tuple[int, ...]:
    """``64x1024x64`` -> (64, 1024, 64). Raises ContractError for anything but one to three positive numbers."""
    parts = text.lower().split("x")
    if not 1 <= len(parts) <= 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ContractError(
            f"shape {text!r}: write N (one row of inputs), ROWSxN (each row is reduced), or MxKxN (a product of "
            "matrices [M, K] and [K, N], reduced over K)"
        )
    return tuple(int(part) for part in parts)


def find_target(
    name: str,
    shape: tuple[int, ...],
    *,
    dtype: str = "float32",
    output: str | None = None,
    library: str | None = None,
    device: str = "cpu",
    operands: int | None = None,
    parts: int = 1,
) -> Target:
    """The reduction of that name.

    Args:
        name: ``torch.sum``, ``torch.matmul``, ``numpy.dot`` and so on; one of this package's kernels
            (``rlkernel.gemm``); ``package.module:function`` or ``FILE.py:function``.
        shape: (n,), (rows, n) or (m, k, n), see :func:`parse_shape`.
        dtype: of the inputs.
        output: of the outputs, where it is another.
        library: what a user's function takes, ``numpy`` or ``torch``; by default torch where NumPy cannot hold them.
        device: of torch tensors.
        operands: 2 for a function of two vectors (a dot product).
        parts: leaves or shards of a kernel of this package.

    Raises:
        ContractError: a name that cannot be found or imported, or options that do not fit it.
    """
    if name in KERNELS:
        if device != "cpu" or library is not None or operands is not None or output is not None:
            raise ContractError(f"{name} is a CPU kernel; of a device, library, operands or output it knows nothing")
        if len(shape) == 1:
            return kernel_target(name, n=shape[0], dtype=dtype, parts=parts)
        columns = shape[2] if len(shape) == 3 else None
        return kernel_target(name, n=shape[1], rows=shape[0], columns=columns, dtype=dtype, parts=parts)
    if parts != 1:
        raise ContractError(f"parts are an option of this package's kernels ({', '.join(KERNELS)}), not of {name}")
    function = _find(name)
    if ":" in name:
        function = _kept(function, name)
    own = name.split(".")[0] if ":" not in name else ""
    if own in _LIBRARIES:
        if library not in (None, own):
            raise ContractError(f"{name} takes {own} arrays, not {library} ones")
        library = own
    library = library or ("numpy" if device == "cpu" and dtype in ("float32", "float64", "float16") else "torch")
    if name in _DOTS and len(shape) == 1:
        operands = 2
    count = operands or (2 if len(shape) == 3 else 1)
    if count not in (1, 2) or ((count == 1) != (len(shape) < 3) and len(shape) != 1):
        raise ContractError(f"{count} operands do not go with the shape {'x'.join(map(str, shape))}")
    given: dict[str, Any] = {"dtype": dtype, "output": output, "library": library, "device": device, "operands": count}
    if len(shape) == 1:
        return function_target(function, name, n=shape[0], **given)
    if len(shape) == 2:
        arguments = {_LAST_AXIS[own]: -1} if own in _LIBRARIES else None
        return function_target(function, name, n=shape[1], rows=shape[0], arguments=arguments, **given)
    rows, n, columns = shape
    return function_target(function, name, n=n, rows=rows, columns=columns, transposed=name in _LINEAR, **given)


def _kept(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A user's function that may not change how others compute: the revealed tree is executed in the same thread."""

    def called(*arguments: Any) -> Any:
        with kept_state(name):
            return function(*arguments)

    return called


def _find(name: str) -> Callable[..., Any]:
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if name.split(".")[0] not in _LIBRARIES or "." not in name:
            raise ContractError(
                f"{name!r} is not known: write torch.NAME or numpy.NAME, package.module:function or FILE.py:function "
                f"for your own, or one of {', '.join(KERNELS)}"
            )
        place, _, attribute = name.rpartition(".")
    with kept_state(f"importing {place}"):
        module = _import_file(Path(place)) if place.endswith(".py") else _import(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "has no" if function is None else "has no function"
        names = [other for other, value in vars(module).items() if callable(value)]
        raise ContractError(f"{place} {what} {attribute!r}{hint(attribute, names)}")
    return function  # type: ignore[no-any-return]


def _import(place: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # a module beside the user, as `python -m` would find it
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ContractError(f"the module {place!r} cannot be imported: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything, SystemExit too
        raise ContractError(f"importing {place} raised {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> Any:
    full = path.resolve()
    spec = importlib.util.spec_from_file_location(f"revealed_{full.stem}", full)
    if not full.is_file() or spec is None or spec.loader is None:
        raise ContractError(f"there is no Python file {full}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything, SystemExit too
        raise ContractError(f"importing {full} raised {type(error).__name__}: {error}") from error
    return module
