"""``vime verify``: does the device at hand compute what the interpreter of the contract predicts for it?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vime.cli.options import NamedChoice, json_option
from vime.errors import InputError

if TYPE_CHECKING:
    from rlkernel.verify.admission.bits import Results
    from rlkernel.verify.vectors.device import Answer, Backend, Line
    from rlkernel.verify.vectors.files import VectorFile

PROFILE_NAMES = ("portable", "hopper", "cdna3")


class PolicyLoss:
    """The trainer's loss as a computation of the optimizer step."""

    implementation = "cpu.loss"

    def run(self, arguments: Mapping[str, Any], workers: Any, bf16: bool) -> Results:
        """Losses of the tokens of a problem."""
        from vime.train.losses import LossConfig, token_losses

        constants = arguments["constants"]
        config = LossConfig(
            constants.policy, 1.0 - constants.low, constants.high - 1.0, constants.kl, constants.beta
        )  # fmt: skip
        names = ("new", "trained", "advantage", "weight", "old", "reference")
        found = token_losses(config, *(arguments[name] for name in names))
        results = {name: getattr(found, name) for name in ("loss", "coefficient", "ratio", "kl")}
        return {**results, "clipped": found.clipped.view("uint8")}


@click.group()
def verify() -> None:
    """Predict known answers, and compare a device's with them.

    The contract's interpreter predicts them; they are shipped.
    """


@verify.command()
@click.option("--profile", type=NamedChoice(PROFILE_NAMES), help="One profile; all that the device has without it.")
@click.option("--on", "target", type=click.Choice(["cpu", "gpu"]), help="The GPU where there is one, or else the CPU.")
@click.option("--region", "regions", multiple=True, metavar="NAME", help="One region, may be repeated; all without it.")
@json_option
def device(profile: str | None, target: str | None, regions: tuple[str, ...], as_json: bool) -> int:
    """Compare this machine's device with the shipped predictions.

    Every region and case is run. Exit code 0: every answer is the predicted one. Exit code 1: an answer differs, a
    kernel failed, or there was nothing to compare. A region without a kernel for this device is named, and is neither.
    """
    from rich.console import Console

    from rlkernel.names import hint
    from rlkernel.verify.vectors.device import lines
    from rlkernel.verify.vectors.device import verify as run
    from rlkernel.verify.vectors.files import read_vectors

    backend = find_backend(target)
    chosen = [pair for pair in backend.profiles if profile in (None, pair[0])]
    if not chosen:
        claimed = ", ".join(dict.fromkeys(name for name, _ in backend.profiles))
        raise InputError(f"profile {profile!r} is not one of {backend.name} ({backend.device}), which has {claimed}")
    files = [read_vectors(name, dtype) for name, dtype in chosen]
    known = sorted({vector.region for file in files for vector in file.vectors})
    for region in regions:
        if region not in known:
            raise InputError(
                f"there are no vectors of region {region!r}; there are of {', '.join(known)}{hint(region, known)}"
            )
    clean = True
    for file in files:
        with Console(stderr=True).status(f"{file.profile} {file.dtype}") as shown:
            answers = run(file, backend, shown.update, regions)
        found = lines(answers)
        clean = clean and verdict(found)
        if as_json:
            for line in found:
                click.echo(json.dumps(line_json(file, backend, line)))
        else:
            print_lines(file, backend, found)
    return 0 if clean else 1


@verify.command()
@click.option("--to", "folder", type=click.Path(file_okay=False), help="Where to write them; the package without it.")
@click.option("--profile", type=NamedChoice(PROFILE_NAMES), help="One profile; all without it.")
def predict(folder: str | None, profile: str | None) -> int:
    """Interpret the vector models anew, and write the vectors.

    Every region and case of them.
    """
    from rlkernel.verify.admission.admit import one_torch_thread
    from rlkernel.verify.vectors.files import FOLDER, write_vectors
    from rlkernel.verify.vectors.files import predict as interpret
    from rlkernel.verify.vectors.problems import PROFILES

    place = Path(folder) if folder else FOLDER
    place.mkdir(parents=True, exist_ok=True)
    with one_torch_thread():
        for name, dtype in PROFILES:
            if profile in (None, name):
                file = interpret(name, dtype, lambda text: click.echo(text, err=True))
                path = write_vectors(file, place)
                click.echo(f"{path}: {len(file.vectors)} vectors, {sum(v.outputs for v in file.vectors):,} outputs")
    return 0


def find_backend(target: str | None) -> Backend:
    """The device to verify. Raises InputError if a GPU is asked for and there is none that a profile is for."""
    from rlkernel.verify.vectors.cpu import CpuBackend
    from rlkernel.verify.vectors.gpu import gpu_backend

    found = None if target == "cpu" else gpu_backend()
    if isinstance(found, str):
        if target == "gpu":
            raise InputError(found)
        found = None
    return CpuBackend(PolicyLoss()) if found is None else found


def verdict(found: list[Line]) -> bool:
    """Whether something was compared, and everything that was is equal."""
    statuses = {line.status for line in found}
    return "equal" in statuses and not statuses & {"differs", "failed", "other inputs"}


def line_json(file: VectorFile, backend: Backend, line: Line) -> dict[str, Any]:
    """One line of ``--json``."""
    return {
        "event": "verified", "profile": file.profile, "dtype": file.dtype, "target": backend.name,
        "device": backend.device, "region": line.region, "case": line.case, "implementation": line.implementation,
        "status": line.status, "vectors": len(line.answers), "outputs_equal": line.outputs,
        "first": None if line.status == "equal" else answer_json(line.first),
    }  # fmt: skip


def answer_json(answer: Answer) -> dict[str, Any]:
    """The answer that is not the predicted one."""
    return {"model": answer.vector.model, "problem": answer.vector.problem, "sentence": answer.sentence}


def print_lines(file: VectorFile, backend: Backend, found: list[Line]) -> None:
    """A table, and a sentence for everything that is not equal."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{file.profile}, {file.dtype}, on {backend.name} ({backend.device})", title_justify="left")
    for name in ("region", "cases", "kernel"):
        table.add_column(name)
    table.add_column("outputs equal", justify="right")
    table.add_column("")
    rows: dict[tuple[str, str, str], list[Line]] = {}
    for line in found:
        rows.setdefault((line.region, line.implementation, line.status), []).append(line)
    for (region, implementation, status), own in rows.items():
        style = {"equal": "green", "no kernel": "dim"}.get(status, "bold red")
        outputs = sum(line.outputs for line in own)
        cases = "\n".join(line.case for line in own)
        table.add_row(region, cases, implementation, f"{outputs:,}", f"[{style}]{status}[/{style}]")
    console.print(table, highlight=False)
    for line in found:
        if line.status not in ("equal", "no kernel"):
            first = line.first
            text = f"{line.region}, {line.case}, {first.vector.problem} (model {first.vector.model}): {first.sentence}"
            console.print(text, style="red", highlight=False, markup=False)
    equal = sum(line.outputs for line in found)
    missing = sorted({line.region for line in found if line.status == "no kernel"})
    console.print(f"{equal:,} outputs have the predicted bits", highlight=False)
    if missing:
        console.print(f"no kernel on {backend.name} for {', '.join(missing)}: predicted, not seen", highlight=False)
