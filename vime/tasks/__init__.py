"""Data sources and rewards that vime ships, under the short names of a pipeline file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "complement_digits": "vime.tasks.digits.complement_rows",
        "reverse_digits": "vime.tasks.digits.reverse_rows",
        "digit_strings": "vime.tasks.tokens.digit_rows",
        "sums": "vime.tasks.sums.rows",
        "arithmetic": "vime.tasks.arithmetic.rows",
        "jsonl": "vime.tasks.jsonl.rows",
    }
)
REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "complement_digits": "vime.tasks.digits.reward",
        "reverse_digits": "vime.tasks.digits.reward",
        "low_tokens": "vime.tasks.tokens.low_tokens",
        "arithmetic": "vime.tasks.arithmetic.reward",
        "exact_match": "vime.tasks.jsonl.exact_match",
    }
)
FILTERS: Mapping[str, str] = MappingProxyType({})
