"""Names in a run directory, beside those that their own modules define."""

from __future__ import annotations

PIPELINE_NAME = "pipeline.yaml"
CONTRACT_NAME = "contract.json"
EVIDENCE_NAME = "evidence.json"
REPORT_NAME = "report.html"
ARRAYS_NAME = "arrays.zarr"
CHECKPOINTS_NAME = "checkpoints"
STAGING_NAME = ".staging"
SET_ASIDE_NAME = "set-aside"
ANNOUNCED_NAMES = (PIPELINE_NAME, CONTRACT_NAME, EVIDENCE_NAME)
"""Files whose bytes the log announces. All others beside it are views: made of these and of the log."""


def step_folder(step: int) -> str:
    """``step-000012``: the folder of a step's arrays, or of its checkpoint."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Inverse of :func:`step_folder`; None for any other name."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and name == step_folder(int(digits)) else None
