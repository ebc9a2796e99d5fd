"""``vime audit``: compile the Triton kernels for both GPUs, without one, and check their machine code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vime.cli.options import json_option
from vime.errors import VimeError

if TYPE_CHECKING:
    from rlkernel.verify.audit.audited import Audited
    from rlkernel.verify.audit.report import Audit


class AuditError(VimeError):
    """The audit cannot start."""

    exit_code = 2


@click.command()
@click.argument("kernel", default="")
@click.option("--target", type=click.Choice(["sm_90", "gfx942"]), help="One target; both without it.")
@json_option
def audit(kernel: str, target: str | None, as_json: bool) -> int:
    """Hold the machine code of the Triton kernels to the contract.

    They are compiled for sm_90 and gfx942, and the code is read.
    KERNEL is the beginning of a kernel's name; all without it. No GPU is needed. Exit code 1 if a kernel fails.
    A target that the audit does not know with the installed Triton is skipped; exit code 2 if nothing is left.
    """
    try:
        from rlkernel.verify.audit.catalogue import audited_kernels
        from rlkernel.verify.audit.report import audit as run
        from rlkernel.verify.audit.targets import why_not_audited
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise AuditError(
            "the audit compiles Triton kernels; Triton is not installed: pip install -e '.[triton]'"
        ) from error
    known = audited_kernels()
    chosen = [k for k in known if k.name.startswith(kernel) and (target is None or k.target.name == target)]
    if not chosen:
        names = ", ".join(sorted({k.name for k in known if target is None or k.target.name == target}))
        raise AuditError(f"no kernel's name begins with {kernel!r}; there are: {names}")
    reasons = {item.target: why_not_audited(item.target) for item in chosen}
    skipped = [item for item in chosen if reasons[item.target]]
    if as_json:
        for item in skipped:
            line = {"kernel": item.name, "target": item.target.name, "claims": item.claims, "passed": False}
            click.echo(json.dumps({**line, "skipped": reasons[item.target]}))
    why = "; ".join(dict.fromkeys(reasons[item.target] for item in skipped))
    if len(skipped) == len(chosen):
        raise AuditError(f"nothing was audited: {why}")
    results = []
    for item in chosen:
        if not reasons[item.target]:
            results.append(run(item))
            if as_json:
                click.echo(json.dumps(results[-1].as_json()))
    if not as_json:
        _print(results, skipped, why)
    return 0 if all(result.passed for result in results) else 1


def _print(results: list[Audit], skipped: list[Audited], why: str) -> None:
    table = Table(title="Triton kernels against the contract")
    for name in ("kernel", "target", "held to", "matrix instructions", "operations of a thread", "outputs proven", ""):
        table.add_column(name, overflow="fold")
    for r in results:
        operations = ", ".join(f"{count} {kind}" for kind, count in sorted(r.machine.items()))
        matrix = ", ".join(f"{count} {name}" for name, count in sorted(r.matrix.items()))
        proven = str(sum(p.outputs for p in r.proofs)) if r.passed else ""
        verdict = "[green]passed[/green]" if r.passed else "[red]FAILED[/red]"
        table.add_row(r.name, r.target, r.claims, matrix, operations, proven, verdict)
    for item in skipped:
        table.add_row(item.name, item.target.name, item.claims, "", "", "", "[yellow]skipped[/yellow]")
    console = Console()
    console.print(table)
    for r in results:
        for violation in r.violations:
            console.print(f"[red]{escape(r.name)}, {r.target}[/red]: {escape(str(violation))}", highlight=False)
    failed = sum(not r.passed for r in results)
    versions = ", ".join(f"{name} {version}" for name, version in results[0].versions)
    left_out = f", {len(skipped)} skipped" if skipped else ""
    console.print(f"{len(results) - failed} of {len(results)} passed{left_out} ({versions})")
    if why:
        console.print(f"[yellow]skipped[/yellow]: {escape(why)}", highlight=False)
