"""Wrong names: which valid one is nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(wrong: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to a wrong one, or None if none is close."""
    names = list(valid)
    folded = {name.casefold(): name for name in names}
    matches = difflib.get_close_matches(wrong.casefold(), list(folded), n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def hint(wrong: str, valid: Iterable[str]) -> str:
    """`` (did you mean 'rms_norm'?)``, to be put at the end of a sentence; empty if no valid name is close."""
    near = nearest_name(wrong, valid)
    return f" (did you mean {near!r}?)" if near is not None else ""
