"""What a run writes beside its log: contract.json, evidence.json, report.html. All of it can be lost without harm.

The log announces the bytes of the first two. report.html is made of them and of the log, and nothing reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import Interrupted
from vime.pipeline.prepare import Prepared
from vime.report.html import render_html
from vime.report.summary import RunSummary, Status
from vime.runtime.assembly import Sides
from vime.runtime.identities import described_deployments
from vime.runtime.places import place_of
from vime.runtime.sides import side_numerics
from vime.store.names import CONTRACT_NAME, EVIDENCE_NAME
from vime.store.run_directory import RunDirectory


def identities_of(directory: RunDirectory) -> dict[str, dict[str, str]]:
    """Identities of all sides, as logged; empty before they were exchanged."""
    contract = directory.timeline.state.contract
    if contract is None:
        return {}
    sides = sorted(contract.sides, key=lambda side: (side != "trainer", side))
    return {side: dict(contract.sides[side]) for side in sides}


def write_contract(directory: RunDirectory, prepared: Prepared, sides: Sides) -> None:
    """contract.json: entries, identities, what the run was deployed on, and the certificates that admit its kernels."""
    directory.write_contract(
        {
            **sides.contract.as_json(),
            "identities": identities_of(directory),
            "deployment": described_deployments(prepared, identities_of(directory)),
            "composition": {side: declared.as_json() for side, declared in sides.declared.items()},
            "numerics": prepared.pipeline.numerics.model_dump(),
            "model": {"source": sides.source},
            "certificates": _certificates(prepared, sides),
        }
    )


def _certificates(prepared: Prepared, sides: Sides) -> list[dict[str, Any]]:
    """Certificates of what both sides compute with, as plain data; none of a side that keeps no contract."""
    place = place_of(prepared.pipeline.device)
    found = {
        certificate.digest(): certificate
        for numerics in sorted(set(sides.numerics.values()))
        for certificate in place.admitted(sides.contract, side_numerics(numerics), sides.workers).certificates
    }
    return [{"digest": name, **certificate.as_json()} for name, certificate in found.items()]


def gathered_evidence(sides: Sides, *, stopped: bool = False) -> dict[str, Any]:
    """The evidence of both sides; the engine of a run that ``stopped`` may be gone."""
    try:
        engine = sides.engine.evidence()
    except Interrupted as error:
        if not stopped:
            raise
        engine = {"calls": [], "facts": {"not asked": str(error)}, "refused": []}
    return {"trainer": sides.trainer.evidence(), sides.engine.engine_id: engine, "claims": sides.claims.as_json()}


def write_report(
    directory: RunDirectory,
    prepared: Prepared,
    sides: Sides,
    evidence: Mapping[str, Any],
    reports: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    status: Status,
    reason: str = "",
) -> None:
    """report.html of a run in progress, or of one that ends."""
    contract = {**sides.contract.as_json(), "model": {"source": sides.source}}
    _write_report(directory, prepared, contract, evidence, reports, evaluations, status, reason)


def rewrite_report(
    directory: RunDirectory,
    prepared: Prepared,
    reports: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
) -> None:
    """report.html of a finished run, from what its processes left: the last of them may have died before writing it.

    Raises InvariantViolation for a file that is not the one that the log announced.
    """
    contract, evidence = (_read(directory, name) for name in (CONTRACT_NAME, EVIDENCE_NAME))
    evidence = {side: evidence[side] for side in ("trainer", *sorted(evidence)) if side in evidence}
    _write_report(directory, prepared, contract, evidence, reports, evaluations, "finished", "")


def _read(directory: RunDirectory, name: str) -> dict[str, Any]:
    """An announced file; empty (and shown as unknown in the report) where it is gone."""
    found = directory.read_announced(name)
    if found is None:
        print(f"vime: {directory.path / name} is gone: the report is written without it", file=sys.stderr)
    return found or {}


def _write_report(
    directory: RunDirectory,
    prepared: Prepared,
    contract: Mapping[str, Any],
    evidence: Mapping[str, Any],
    reports: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    status: Status,
    reason: str,
) -> None:
    pipeline = prepared.pipeline
    summary = RunSummary.from_data(
        pipeline.name,
        reports,
        evaluations,
        contract={key: value for key, value in contract.items() if key != "model"},
        evidence=evidence,
        identities=identities_of(directory),
        status=status,
        reason=reason,
        facts={
            "model": contract.get("model", {}).get("source", "unknown"),
            "dtype": pipeline.contract.dtype,
            "profile": pipeline.contract.profile,
            "seed": str(pipeline.seed),
            "placement": pipeline.placement,
            "run digest": directory.timeline.run_digest(),
        },
        native=(side for side in ("rollout", "trainer") if getattr(pipeline.numerics, side) == "native"),
    )
    directory.write_report(render_html(summary))
