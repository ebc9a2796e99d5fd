"""What an event is: typed fields of three kinds, and their one encoding as JSON."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, ClassVar, get_type_hints

import numpy as np

from vime.types import SampleId, VersionRun

OrderKey = tuple[str, int, int, int, str]
"""Place of a free event inside its segment: (namespace, prompt_index, k, rank, text)."""


class Scope(Enum):
    """Where an event counts.

    ``RUN``: what the run computed; compared by diff and replay, hashed into the run digest.
    ``SCHEDULING``: how the machinery got there (starts, aborts, transfers to each engine, checkpoints). Checked by the
    invariants when it happens and compared where a replay makes it again, but two equal runs may differ in it.
    ``BOOKKEEPING``: what befell the processes; in the log, and nowhere compared.
    """

    RUN = "run"
    SCHEDULING = "scheduling"
    BOOKKEEPING = "bookkeeping"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events.

    Fields are *logical* (compared and hashed), *deployment* (declared with :func:`deployment`: which engine, which
    placement; checked by invariants, never compared between runs) or ``observed`` (wall times, host, pid, durations,
    paths; JSON data that nothing compares).

    ``barrier``: the log is on disk, synced, before ``append`` returns. ``free``: the order among free events
    between two ordered ones depends on scheduling and does not count; ``order_key`` puts them in order.
    """

    type: ClassVar[str] = ""
    scope: ClassVar[Scope] = Scope.RUN
    barrier: ClassVar[bool] = False
    free: ClassVar[bool] = False

    observed: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def order_key(self) -> OrderKey:
        """Place among the free events of a segment."""
        return ("", 0, 0, 0, "")

    def logical(self) -> dict[str, Any]:
        """Logical fields as JSON data without floats."""
        return {name: encode(getattr(self, name)) for name, encode, _ in _codecs(type(self)).logical}

    def deployment(self) -> dict[str, Any]:
        """Deployment fields as JSON data without floats."""
        return {name: encode(getattr(self, name)) for name, encode, _ in _codecs(type(self)).deployment}

    def describe(self, limit: int = 400) -> str:
        """``type {logical fields}`` on one line, for messages."""
        text = f"{self.type} {to_json(self.logical())}"
        return text if len(text) <= limit else text[:limit] + "..."


def deployment(**kwargs: Any) -> Any:
    """Declare a deployment field."""
    return field(metadata={"deployment": True}, **kwargs)


def to_json(value: Any) -> str:
    """The one JSON text of encoded data: sorted keys, no whitespace, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def encode_value(value: Any) -> Any:
    """JSON data of a value; floats become ``f64:`` and 16 hex digits, so that every bit is kept.

    Strings that begin like an encoded float (or like this escape) are prefixed with ``str:``.
    Raises TypeError for anything that is not plain data.
    """
    if isinstance(value, str):
        return "str:" + value if value.startswith(("f64:", "str:")) else value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (float, np.floating)):
        return "f64:" + struct.pack(">d", float(value)).hex()
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, (list, tuple)):
        return [encode_value(item) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"an event cannot hold the key {key!r}: keys are strings")
        return {key: encode_value(item) for key, item in value.items()}
    raise TypeError(f"an event cannot hold {value!r} of type {type(value).__name__}: only plain data can be logged")


def encode_observed(value: Any) -> Any:
    """JSON data of an observation. Nothing compares it, so what JSON lacks becomes text."""
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [encode_observed(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode_observed(item) for key, item in value.items()}
    return str(value)


def decode_value(value: Any) -> Any:
    """Inverse of :func:`encode_value`; sequences come back as tuples."""
    if isinstance(value, str):
        if value.startswith("f64:"):
            return struct.unpack(">d", bytes.fromhex(value[4:]))[0]
        return value.removeprefix("str:")
    if isinstance(value, list):
        return tuple(decode_value(item) for item in value)
    if isinstance(value, dict):
        return {key: decode_value(item) for key, item in value.items()}
    return value


_Codec = tuple[str, Callable[[Any], Any], Callable[[Any], Any]]


@dataclass(frozen=True)
class _Codecs:
    logical: tuple[_Codec, ...]
    deployment: tuple[_Codec, ...]
    required: frozenset[str]


@cache
def _build_codecs(kind: Any) -> _Codecs:
    hints = get_type_hints(kind)
    parts: dict[bool, list[_Codec]] = {False: [], True: []}
    required = set()
    for item in fields(kind):
        if item.name == "observed":
            continue
        encode, decode = _codec(hints[item.name])
        parts[bool(item.metadata.get("deployment"))].append((item.name, encode, decode))
        if item.default is MISSING and item.default_factory is MISSING:
            required.add(item.name)
    return _Codecs(tuple(parts[False]), tuple(parts[True]), frozenset(required))


def _codecs(kind: type[Event]) -> _Codecs:
    key: Any = kind  # a class is hashable even where its instances are not
    return _build_codecs(key)


def _codec(hint: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if hint is SampleId:
        return str, SampleId.parse
    if hint == tuple[SampleId, ...]:
        return (lambda ids: [str(i) for i in ids]), (lambda texts: tuple(SampleId.parse(t) for t in texts))
    if hint == tuple[VersionRun, ...]:
        return (
            lambda runs: [[r.count, r.version, r.kv_oldest, r.kv_newest] for r in runs],
            lambda rows: tuple(VersionRun(*row) for row in rows),
        )
    if hint is float:
        return (lambda x: encode_value(float(x))), decode_value
    return encode_value, decode_value


def decode_event(kind: type[Event], logical: Any, placed: Any, observed: Any) -> Event:
    """Inverse of ``logical``, ``deployment`` and ``observed``. Raises ValueError naming missing or unknown fields."""
    codecs = _codecs(kind)
    values: dict[str, Any] = {}
    for what, data, known in (("logical", logical, codecs.logical), ("deployment", placed, codecs.deployment)):
        if not isinstance(data, dict):
            raise ValueError(f"the {what} fields of {kind.type} are {data!r}: an object is required")
        decoders = {name: decode for name, _, decode in known}
        if unknown := sorted(set(data) - set(decoders)):
            raise ValueError(f"{kind.type} has no {what} fields {unknown}; known are {sorted(decoders)}")
        for name, value in data.items():
            values[name] = decoders[name](value)
    if missing := sorted(codecs.required - set(values)):
        raise ValueError(f"{kind.type} lacks the fields {missing}")
    if not isinstance(observed, dict):
        raise ValueError(f"the observations of {kind.type} are {observed!r}: an object is required")
    return kind(observed=observed, **values)
