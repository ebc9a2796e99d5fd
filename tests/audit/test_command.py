"""``vime audit``: table, JSON, a choice of kernel and target, unknown names, a failing kernel."""

from __future__ import annotations

import json

import pytest
import triton
from click.testing import CliRunner

from rlkernel.errors import ContractError
from rlkernel.verify.audit import catalogue
from rlkernel.verify.audit.report import audit as run
from rlkernel.verify.audit.targets import GFX942, SM_90, why_not_audited
from tests.audit.planted import planted_kernels
from vime.cli.audit import AuditError, audit

newest = pytest.mark.skipif(bool(why_not_audited(GFX942)), reason="gfx942 is audited with a later Triton")


@newest
def test_json_of_one_kernel() -> None:
    result = CliRunner().invoke(audit, ["exp2_p3", "--json"], standalone_mode=False)
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [(line["kernel"], line["target"], line["passed"]) for line in lines] == [
        ("exp2_p3", "sm_90", True),
        ("exp2_p3", "gfx942", True),
    ]
    assert all(line["written"] == {"add": 3072, "fma": 3072} and line["outputs_proven"] == 1000 for line in lines)
    assert result.return_value == 0


@newest
def test_table_names_the_target() -> None:
    result = CliRunner().invoke(audit, ["maximum", "--target", "gfx942"], standalone_mode=False)
    assert "1 of 1 passed" in result.output and "gfx942" in result.output and "sm_90" not in result.output


def test_unknown_kernel_is_refused_with_the_names() -> None:
    with pytest.raises(AuditError, match=r"no kernel's name begins with 'softmax'; there are: .*rms_norm"):
        CliRunner().invoke(audit, ["softmax"], standalone_mode=False, catch_exceptions=False)


def test_a_target_that_this_triton_compiles_otherwise_is_skipped_and_never_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    result = CliRunner().invoke(audit, ["exp2_p3", "--json"], standalone_mode=False)
    lines = {line["target"]: line for line in map(json.loads, result.output.splitlines())}
    assert result.return_value == 0 and lines["sm_90"]["passed"] is True and "skipped" not in lines["sm_90"]
    reason = "the audit of gfx942 is for Triton 3.9 and later, and Triton 3.6.0 is installed"
    assert lines["gfx942"]["passed"] is False and lines["gfx942"]["skipped"].startswith(reason)
    table = CliRunner().invoke(audit, ["exp2_p3"], standalone_mode=False)
    assert table.return_value == 0 and "1 of 1 passed, 1 skipped" in table.output
    assert reason in " ".join(table.output.split())
    with pytest.raises(AuditError, match=f"nothing was audited: {reason}") as refused:
        CliRunner().invoke(audit, ["exp2", "--target", "gfx942"], standalone_mode=False, catch_exceptions=False)
    assert refused.value.exit_code == 2
    (kernel,) = (k for k in catalogue.audited_kernels() if (k.name, k.target) == ("exp2_p3", GFX942))
    with pytest.raises(ContractError, match=reason):
        run(kernel)


@pytest.mark.parametrize(
    ("version", "audited"),
    [("3.6.0", (True, False)), ("3.8.1", (True, False)), ("3.9.0+git1a2b", (True, True)), ("3.10.0", (True, True)),
     ("3.5.1", (False, False))],
)  # fmt: skip
def test_which_triton_each_target_is_audited_with(
    monkeypatch: pytest.MonkeyPatch, version: str, audited: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert tuple(not why_not_audited(target) for target in (SM_90, GFX942)) == audited


@newest
def test_a_violation_names_instruction_and_line_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = next(p for p in planted_kernels() if p.name == "tl.exp" and p.audited.target.name == "gfx942")
    monkeypatch.setattr(catalogue, "audited_kernels", lambda: (planted.audited,))
    result = CliRunner().invoke(audit, ["uses_exp"], standalone_mode=False)
    assert result.return_value == 1
    assert "v_exp_f32" in result.output and "planted.py:" in result.output and "0 of 1 passed" in result.output
