"""Canonical JSON: one byte string a value. Sorted keys, no whitespace, no floats (constants are bit patterns)."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

from rlkernel.errors import ContractError


def float32_bits(value: float) -> str:
    """Bit pattern of a float rounded once to float32, e.g. ``f32:3f800000``."""
    return "f32:" + struct.pack(">f", value).hex()


def bits_float32(bits: str) -> float:
    """Inverse of :func:`float32_bits`. Raises ContractError for anything else."""
    return _from_bits(bits, "f32:", ">f", 8)


def bits_float64(bits: str) -> float:
    """Inverse of :func:`float64_bits`. Raises ContractError for anything else."""
    return _from_bits(bits, "f64:", ">d", 16)


def _from_bits(bits: str, prefix: str, form: str, digits: int) -> float:
    pattern = bits.removeprefix(prefix)
    well_formed = bits.startswith(prefix) and len(pattern) == digits and not set(pattern) - set("0123456789abcdef")
    if not well_formed:
        raise ContractError(f"{bits!r} is no bit pattern: {prefix} and {digits} hexadecimal digits are needed")
    return float(struct.unpack(form, bytes.fromhex(pattern))[0])


def float64_bits(value: float) -> str:
    """Bit pattern of a float64, e.g. ``f64:3ff0000000000000``."""
    return "f64:" + struct.pack(">d", value).hex()


def _refuse_floats(value: Any, path: str) -> None:
    if isinstance(value, float):
        raise ContractError(f"{path or 'value'} is the raw float {value!r}: write its bit pattern (float32_bits)")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ContractError(f"{path or 'value'} has the key {key!r}: keys are strings")
            _refuse_floats(item, f"{path}.{key}" if path else key)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_floats(item, f"{path}[{index}]")
    elif not isinstance(value, (str, int, bool, type(None))):
        raise ContractError(f"{path or 'value'} is a {type(value).__name__}: only JSON data can be hashed")


def canonical_json(value: Any) -> bytes:
    """Encode plain data. Raises ContractError for raw floats, non-string keys and other types."""
    _refuse_floats(value, "")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest(value: Any) -> str:
    """SHA-256 (hex) over the canonical JSON of plain data."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
