"""Every planted fault fails the audit: the violation names the instruction and the source line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkernel.verify.audit.findings import POINTS
from rlkernel.verify.audit.report import audit
from tests.audit.planted import Planted, planted_kernels

PLANTED = planted_kernels()


def _source_line(file: str, line: int) -> str:
    return Path(file).read_text().splitlines()[line - 1] if line else ""


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: f"{p.audited.target.name}-{p.name}".replace(" ", "_"))
def test_is_found(planted: Planted) -> None:
    result = audit(planted.audited)
    assert not result.passed
    found = [v for v in result.violations if v.rule == planted.rule and planted.instruction in v.instruction]
    assert found, f"no violation {planted.rule!r} among: " + "; ".join(map(str, result.violations))
    if planted.line:
        lines = {_source_line(v.location.file, v.location.line).strip() for v in found}
        assert any(planted.line in line for line in lines), lines
    assert {v.point for v in result.violations} <= set(POINTS)


def test_the_required_faults_are_planted_on_the_targets_that_have_them() -> None:
    planted = {(p.name.split(",")[0], p.audited.target.name) for p in PLANTED}
    for name in ("tl.exp", "tl.rsqrt", "another exp2", "fused multiply-add", "float atomics", "tf32 dot"):
        assert {(name, "sm_90"), (name, "gfx942")} <= planted
    assert {("leaf folded into the chain", "sm_90"), ("leaf folded into the chain", "gfx942")} <= planted
    assert ("kpack=2", "gfx942") in planted  # an option of the AMD backend alone


def test_kpack_message_says_which_k_one_step_adds() -> None:
    planted = next(p for p in PLANTED if p.name == "kpack=2, bf16")
    messages = [v.message for v in audit(planted.audited).violations]
    assert any("one step adds k 0-3, 8-11" in message for message in messages), messages
