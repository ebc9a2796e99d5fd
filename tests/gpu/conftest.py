"""These tests need Triton, most of them also a GPU of sm_90."""

from __future__ import annotations

from importlib.util import find_spec

if not find_spec("triton"):
    collect_ignore_glob = ["test_*.py"]
