"""``vime admit``: a kernel's bits against the interpreter of its contract: one of the user's own, or all of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vime.cli.options import NamedChoice, json_option
from vime.errors import InputError

if TYPE_CHECKING:
    from rlkernel.contract.build import Contract
    from rlkernel.verify.admission.budget import Budget
    from rlkernel.verify.admission.certificate import AdmissionRefused, Certificate

FORWARD, BACKWARD = "trainer_forward", "trainer_backward"


@click.command()
@click.argument("name", required=False, metavar="[MODULE:FUNCTION]")
@click.option("--region", metavar="REGION", help="What the function computes, as in 'rms_norm'.")
@click.option("--backward", is_flag=True, help="The function is the region's gradient.")
@click.option("--profile", help="Of the contract: portable, hopper, cdna3.  [default: that of --pipeline, or portable]")
@click.option("--dtype", type=NamedChoice(["float32", "bfloat16"]), help="[default: that of --pipeline, or float32]")
@click.option("--takes", type=click.Choice(["torch", "numpy"]), default="torch", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of torch tensors, as in 'cuda'.")
@click.option("--pipeline", type=click.Path(dir_okay=False), metavar="FILE", help="Take the contract from a pipeline.")
@click.option("--full", is_flag=True, help="Compare at least a million outputs, not only the quick set.")
@click.option("--all", "everything", is_flag=True, help="Admit all kernels of --device, for --pipeline or all presets.")
@click.option("--to", "folder", type=click.Path(file_okay=False), help="Keep the certificate in this folder.")
@click.option("--signatures", is_flag=True, help="Print how a function of each region is called.")
@json_option
def admit(
    name: str | None,
    region: str | None,
    backward: bool,
    profile: str | None,
    dtype: str | None,
    takes: str,
    device: str,
    pipeline: str | None,
    full: bool,
    everything: bool,
    folder: str | None,
    signatures: bool,
    as_json: bool,
) -> int:
    """Compare a kernel with its contract's interpreter, bit for bit.

    MODULE:FUNCTION (or FILE.py:FUNCTION) is compared over shapes and values where kernels go wrong. Exit code 0: every
    bit is the contract's. Exit code 1: one differs; the first difference is shown, and which of the contract's six
    points explains it. Exit code 2: there is no such function, region or device.
    """
    from rlkernel.verify.admission.budget import FULL, QUICK

    budget = FULL if full else QUICK
    if signatures:
        return _print_signatures(as_json)
    if takes == "numpy" and device != "cpu":
        raise InputError(f"--device {device} is of torch tensors; with --takes numpy the function runs on the CPU")
    if everything:
        if name or region or backward:
            raise InputError("--all admits this package's own kernels; leave the function, --region and --backward out")
        return _admit_all(pipeline, profile, dtype, device, budget, folder, as_json)
    if not name or not region:
        raise InputError("name a function and its --region, as in: vime admit my.kernels:norm --region rms_norm")
    case = BACKWARD if backward else FORWARD
    contract = _contract(pipeline, profile, dtype)
    return _admit_function(name, region, case, contract, takes, device, budget, folder, as_json)


def _print_signatures(as_json: bool) -> int:
    from rlkernel.verify.admission.user import GRADIENTS, SIGNATURES

    for title, table in (("", SIGNATURES), (" --backward", GRADIENTS)):
        for region, text in table.items():
            if as_json:
                click.echo(json.dumps({"region": region, "backward": bool(title), "signature": text}))
            else:
                click.echo(f"{region + title:24s} {text}")
    return 0


def _contract(pipeline: str | None, profile: str | None, dtype: str | None) -> Contract:
    """The contract of a pipeline, or of a model of usual dimensions."""
    from rlkernel.contract.build import build_contract
    from rlkernel.models.config import ModelConfig

    if pipeline is not None:
        from vime.cli.contract import read_pipeline_contract

        given = {"contract.profile": profile, "contract.dtype": dtype}
        return read_pipeline_contract(pipeline, tuple(f"{key}={value}" for key, value in given.items() if value))
    profile = profile or "portable"
    chosen = dtype or ("float32" if profile == "portable" else "bfloat16")
    config = ModelConfig(
        family="qwen3", vocab_size=1000, hidden_size=1024, intermediate_size=3072, num_layers=1, num_heads=16,
        num_kv_heads=8, head_dim=64, max_position=4096, qk_norm=True,
    )  # fmt: skip
    return build_contract(config, profile=profile, dtype=chosen)


def _admit_function(
    name: str,
    region: str,
    case: str,
    contract: Contract,
    takes: str,
    device: str,
    budget: Budget,
    folder: str | None,
    as_json: bool,
) -> int:
    from rlkernel.verify.admission.admit import admit as admit_candidate
    from rlkernel.verify.admission.certificate import AdmissionRefused
    from rlkernel.verify.admission.sources import device_target
    from rlkernel.verify.admission.store import write_certificates
    from rlkernel.verify.admission.user import UserOp, find_function, signature

    call = signature(region, case)
    target = device_target(device)
    candidate = UserOp(name, find_function(name), region, case, contract.dtype, takes, device)  # type: ignore[arg-type]
    try:
        certificate = admit_candidate(candidate, region, case, contract, target, budget)
    except AdmissionRefused as refused:
        _print_refusal(refused, call, as_json, _bias(region, contract))
        return 1
    if folder is not None:
        write_certificates([certificate], Path(folder))
    _print_admission(certificate, as_json, _bias(region, contract))
    if folder is not None and not as_json:
        click.echo(f"  kept in:  {folder}")
    return 0


def _bias(region: str, contract: Contract) -> str | None:
    """What the contract's model has of a bias, for a region that is a projection."""
    from rlkernel.verify.admission.user import LINEAR

    if region not in LINEAR:
        return None
    if region != "qkv_proj":
        return f"none: {region} has no bias in any model here, so that the function was called without one"
    if contract.config.qkv_bias:
        return "the model's q, k and v have one each: the function was called as f(x, weight, bias)"
    return (
        "none: this model's projections have no bias, so that the function was called without one; --pipeline compares "
        "with a model that has one (qwen2)"
    )


def _print_admission(certificate: Certificate, as_json: bool, bias: str | None = None) -> None:
    if as_json:
        click.echo(json.dumps({"event": "admitted", "bias": bias, "certificate": certificate.as_json()}))
        return
    click.echo(
        f"admitted: {certificate.implementation} computes {certificate.region} of profile {certificate.profile}, "
        f"{certificate.dtype}, on {certificate.target} ({', '.join(certificate.cases)})"
    )
    for link in certificate.links:
        click.echo(f"  equal:    {link.left} = {link.right} on {link.outputs:,} outputs, none differs")
    click.echo(f"  shapes:   {', '.join(certificate.shape_classes)}")
    click.echo(f"  values:   {', '.join(certificate.hazards)}")
    if bias is not None:
        click.echo(f"  bias:     {bias}")


def _print_refusal(refused: AdmissionRefused, call: str, as_json: bool, bias: str | None = None) -> None:
    report = refused.report
    if as_json:
        click.echo(json.dumps({"event": "refused", "bias": bias, **report}))
        return
    click.echo(f"refused: {report['implementation']} is not {report['region']} of this contract")
    if bias is not None:
        click.echo(f"  bias:     {bias}")
    if "difference" not in report:
        click.echo(f"  where:    {report['case']}: {report['problem']}")
        click.echo(f"  failure:  {report['failure']}")
        if call:
            click.echo(f"  it is called as {call}")
        return
    difference, explanation = report["difference"], report["explanation"]
    index = ", ".join(str(i) for i in difference["index"])
    place = f"{difference['output']}[{index}]" if index else difference["output"]
    click.echo(f"  where:    {report['case']}: {report['problem']}; values: {report['hazard']}")
    click.echo(
        f"  first:    {place} is {difference['found']}, the contract gives "
        f"{difference['expected']}; {difference['differing']:,} of {difference['compared']:,} outputs differ"
    )
    certainty = "" if explanation["certain"] or explanation["point"] is None else " (probably)"
    none = "none" if explanation["certain"] else "none found"
    click.echo(f"  point:    {explanation['point'] or none}{certainty}: {explanation['sentence']}")
    for other in explanation["alternatives"]:
        click.echo(f"            or {other}")


def _admit_all(
    pipeline: str | None,
    profile: str | None,
    dtype: str | None,
    device: str,
    budget: Budget,
    folder: str | None,
    as_json: bool,
) -> int:
    from rlkernel.contract.build import build_contract
    from rlkernel.kernels.cpu.threads import Workers
    from rlkernel.models.presets import PRESETS
    from rlkernel.verify.admission.certificate import AdmissionRefused
    from rlkernel.verify.admission.parallel import processes_here
    from rlkernel.verify.admission.sources import device_target
    from rlkernel.verify.admission.store import ensure_certificates, user_folder

    target = device_target(device)
    if pipeline is not None:
        contracts = [_contract(pipeline, profile, dtype)]
    else:
        given = profile or "portable"
        both = ("float32", "bfloat16") if given == "portable" else ("bfloat16",)
        dtypes = both if dtype is None else (dtype,)
        contracts = [
            build_contract(config, profile=given, dtype=kind) for config in PRESETS.values() for kind in dtypes
        ]
    keep = Path(folder) if folder else user_folder()
    workers, count = Workers(), 0
    for contract in contracts:
        try:
            for where, candidates in _candidates(contract, device, target):
                admitted = ensure_certificates(
                    contract, candidates, workers, target=where, budget=budget, folders=[keep], keep=keep,
                    processes=1 if where == "cpu" else processes_here(),
                    say=lambda text: None if as_json else click.echo(text),
                )  # fmt: skip
                for certificate in admitted.made:
                    _print_admission(certificate, as_json)
                for note in admitted.notes:
                    click.echo(f"vime: {note}", err=True)
                count += len(admitted.certificates)
        except AdmissionRefused as refused:
            _print_refusal(refused, "", as_json)
            return 1
    summary: dict[str, Any] = {"event": "all", "certificates": count, "folder": str(keep)}
    click.echo(json.dumps(summary) if as_json else f"{count} certificates are valid in {keep}")
    return 0


def _candidates(contract: Contract, device: str, target: str) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Targets and what a run on the device computes with there: the policy loss stays on the CPU."""
    from rlkernel.ops.composition import cpu_candidates
    from vime.train.admission import step_candidates

    if target == "cpu":
        return [("cpu", [*((c.region, c.op) for c in cpu_candidates()), *step_candidates()])]
    import torch

    from rlkernel.verify.admission.device import device_candidates

    own = device_candidates(contract, torch.device(device))
    return [(target, list(own)), ("cpu", [pair for pair in step_candidates() if pair[0] == "loss"])]
