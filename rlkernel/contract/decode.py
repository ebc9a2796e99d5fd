"""Strict decoding of plain data into frozen dataclasses: unknown fields, raw floats and conversions are refused."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rlkernel.errors import ContractError

_hints = cache(get_type_hints)


def decode(kind: Any, data: Any, path: str) -> Any:
    """Build a value of type ``kind`` from JSON data.

    Types are dataclasses, ``int``, ``bool``, ``str``, ``Literal`` and tuples of these (lists in JSON).

    Args:
        path: where the data stand, for messages.

    Raises:
        ContractError: naming the path, what stands there and what is needed.
    """
    if isinstance(data, float):
        raise ContractError(f"{path} is the raw float {data!r}: constants are written as bit patterns (f32:3f800000)")
    if is_dataclass(kind):
        return _decode_dataclass(kind, data, path)
    origin = get_origin(kind)
    if origin is Literal:
        if data not in get_args(kind) or isinstance(data, bool):
            raise ContractError(f"{path} is {data!r}: one of {', '.join(map(repr, get_args(kind)))} is needed")
        return data
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, path)
    if type(data) is not kind:
        raise ContractError(f"{path} is {data!r}: {kind.__name__} is needed")
    return data


def _decode_dataclass(kind: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise ContractError(f"{path} is {data!r}: an object with the fields of {kind.__name__} is needed")
    check_fields(data, [item.name for item in fields(kind)], path, kind.__name__)
    hints = _hints(kind)
    return kind(**{name: decode(hints[name], value, f"{path}.{name}") for name, value in data.items()})


def _decode_tuple(kinds: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise ContractError(f"{path} is {data!r}: a list is needed")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(data)
    if len(kinds) != len(data):
        raise ContractError(f"{path} has {len(data)} elements: {len(kinds)} are needed")
    return tuple(decode(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True)))


def check_fields(data: dict[str, Any], names: list[str], path: str, what: str) -> None:
    """Raise ContractError unless an object has exactly these fields."""
    unknown, missing = sorted(set(data) - set(names)), sorted(set(names) - set(data))
    if unknown or missing:
        wrong = [f"unknown fields {unknown}"] * bool(unknown) + [f"missing fields {missing}"] * bool(missing)
        raise ContractError(f"{path}: {', '.join(wrong)}; {what} has {sorted(names)}")
