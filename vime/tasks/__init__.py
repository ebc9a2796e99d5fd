"""Data sources and rewards that vime ships, under the short names of a pipeline file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "reverse_digits": "vime.tasks.reverse_digits.rows",
        "arithmetic": "vime.tasks.arithmetic.rows",
        "jsonl": "vime.tasks.jsonl.rows",
    }
)
REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "reverse_digits": "vime.tasks.reverse_digits.reward",
        "arithmetic": "vime.tasks.arithmetic.reward",
        "exact_match": "vime.tasks.jsonl.exact_match",
    }
)
FILTERS: Mapping[str, str] = MappingProxyType({})
