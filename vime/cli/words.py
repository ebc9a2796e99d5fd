"""Counts and things in words."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """``1 step``, ``40 steps``, ``1,280 samples``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
