"""``vime audit``: table, JSON, a choice of kernel and target, unknown names, a failing kernel."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rlkernel.verify.audit import catalogue
from tests.audit.planted import planted_kernels
from vime.cli.audit import AuditError, audit


def test_json_of_one_kernel() -> None:
    result = CliRunner().invoke(audit, ["exp2_p3", "--json"], standalone_mode=False)
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [(line["kernel"], line["target"], line["passed"]) for line in lines] == [
        ("exp2_p3", "sm_90", True),
        ("exp2_p3", "gfx942", True),
    ]
    assert all(line["written"] == {"add": 3072, "fma": 3072} and line["outputs_proven"] == 1000 for line in lines)
    assert result.return_value == 0


def test_table_names_the_target() -> None:
    result = CliRunner().invoke(audit, ["maximum", "--target", "gfx942"], standalone_mode=False)
    assert "1 of 1 passed" in result.output and "gfx942" in result.output and "sm_90" not in result.output


def test_unknown_kernel_is_refused_with_the_names() -> None:
    with pytest.raises(AuditError, match=r"no kernel's name begins with 'softmax'; there are: .*rms_norm"):
        CliRunner().invoke(audit, ["softmax"], standalone_mode=False, catch_exceptions=False)


def test_a_violation_names_instruction_and_line_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = next(p for p in planted_kernels() if p.name == "tl.exp" and p.audited.target.name == "gfx942")
    monkeypatch.setattr(catalogue, "audited_kernels", lambda: (planted.audited,))
    result = CliRunner().invoke(audit, ["uses_exp"], standalone_mode=False)
    assert result.return_value == 1
    assert "v_exp_f32" in result.output and "planted.py:" in result.output and "0 of 1 passed" in result.output
