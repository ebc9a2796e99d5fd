"""Primitives by the name that an entry of the contract gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkernel.errors import ContractError
from rlkernel.reference.primitives import PRIMITIVES


def primitive(name: str) -> Callable[..., Any]:
    """The function of a primitive on torch tensors. Raises ContractError for a name outside the closed set."""
    if name not in PRIMITIVES:
        raise ContractError(f"primitive {name!r} is not defined; the closed set is {', '.join(sorted(PRIMITIVES))}")
    return PRIMITIVES[name].function
