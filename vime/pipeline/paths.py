"""Names that no file system takes."""

from __future__ import annotations

import os
from pathlib import Path

LONGEST_NAME = 220
"""Bytes of one name: file systems take 255, and a run is built under a name that is a little longer than its own."""
LONGEST_PATH = 3800
"""Bytes of a whole path: the system takes 4,096, and files lie below."""


def unusable_path(name: str) -> str | None:
    """Why no file system takes a path; None if it may."""
    if "\0" in name:
        return f"{_cut(name)} holds a NUL character, which no path may"
    try:
        parts = [os.fsencode(part) for part in Path(name).parts]
    except UnicodeEncodeError:
        return f"{_cut(name)} cannot be written as a path here"
    longest = max(map(len, parts), default=0)
    if longest > LONGEST_NAME:
        return f"{_cut(name)} has a part of {longest} bytes: {LONGEST_NAME} are possible"
    total = len(os.fsencode(Path(name).absolute()))
    if total > LONGEST_PATH:
        return f"{_cut(name)} is a path of {total} bytes: {LONGEST_PATH} are possible"
    return None


def _cut(name: str) -> str:
    return repr(name) if len(name) <= 60 else repr(name[:57] + "...")
