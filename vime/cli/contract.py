"""``vime contract``: what a pipeline's two sides have to compute, as a table, as digests, as a file, and compared."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vime.cli.options import json_option, overrides_option, pipeline_argument
from vime.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from rlkernel.contract.build import Contract
    from rlkernel.contract.differences import Difference

_LAYER = re.compile(r"layers\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\blayers\.)\d+|(?<=\bstream\.)\d+")
PIPELINE_SUFFIXES = (".yaml", ".yml")


@click.group()
def contract() -> None:
    """Show, compare and export the numerical contract of a pipeline.

    Six points for every region and case, claims, identities.
    """


@contract.command()
@pipeline_argument
@overrides_option
@click.option("--case", metavar="CASE", help="Only this case, as in 'rollout_decode'.")
@click.option("--region", metavar="REGION", help="Only this region, as in 'rms_norm' or 'o_proj.wgrad'.")
@json_option
def show(pipeline: str, overrides: tuple[str, ...], case: str | None, region: str | None, as_json: bool) -> int:
    """Print the six points of every region and case of PIPELINE.

    The dtypes between regions follow.
    """
    from rlkernel.contract.table import boundaries, table_rows

    found = read_pipeline_contract(pipeline, overrides)
    rows = table_rows(found, case, region)
    edges = [
        edge if case is None else replace(edge, cases=(case,))
        for edge in boundaries(found)
        if (case is None or case in edge.cases) and (region is None or region in (edge.source, edge.target))
    ]
    if as_json:
        for row in rows:
            click.echo(json.dumps({"event": "entry", **row.as_json()}))
        for edge in edges:
            click.echo(json.dumps({"event": "boundary", **edge.as_json()}))
        return 0
    from rich.console import Console

    console = Console()
    console.print(_heading(found), highlight=False)
    console.print(_points_table(rows), highlight=False)
    if edges:
        console.print(_boundary_table(edges), highlight=False)
    return 0


def _heading(found: Contract) -> str:
    from rlkernel.contract.claims import STATE_CLAIMS
    from rlkernel.contract.table import readable

    degrees = ", ".join(f"{axis} {degree}" for axis, degree in found.topology.as_json().items())
    states = "; ".join(f"{claim.state} by {' and '.join(claim.invalidated_by)}" for claim in STATE_CLAIMS)
    lines = [
        f"profile {found.profile}, dtype {found.dtype}, temperature {readable(found.temperature)}",
        f"bits are invariant up to the degrees {degrees}",
        f"caches are invalidated: {states}",
    ]
    if found.optimizer is not None:
        lines.append("optimizer " + _flat(found.optimizer))
    return "\n".join(lines).replace("_", " ")


def _flat(value: Any) -> str:
    from rlkernel.contract.table import readable

    parts = []
    for key, item in value.items():
        parts.append(f"{key} ({_flat(item)})" if isinstance(item, dict) else f"{key} {readable(str(item))}")
    return ", ".join(parts)


def _points_table(rows: Any) -> Table:
    from rich import box
    from rich.table import Table

    from rlkernel.contract.table import describe

    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    for name in ("region", "point", "what it is"):
        table.add_column(name, no_wrap=name != "what it is", overflow="fold")
    for row in rows:
        table.add_row(row.region, "cases", ", ".join(row.cases))
        points = list(describe(row.points).items())
        for i, (point, text) in enumerate(points, start=1):
            table.add_row("", point, text, end_section=i == len(points))
    return table


def _boundary_table(edges: Any) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="between regions", title_justify="left")
    for name in ("from", "to", "dtype", "cases"):
        table.add_column(name, no_wrap=name != "cases")
    for edge in edges:
        table.add_row(edge.source, edge.target, edge.dtype, ", ".join(edge.cases))
    return table


@contract.command()
@pipeline_argument
@overrides_option
@json_option
def digest(pipeline: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Print the identities of both sides, and a digest of every entry."""
    from rlkernel.contract.canonical import digest as sha256
    from vime.pipeline.loading import load_pipeline
    from vime.pipeline.prepare import prepare
    from vime.runtime.identities import expected_identities
    from vime.runtime.sides import pipeline_contract

    _refuse_exported(pipeline)
    prepared = prepare(load_pipeline(pipeline, overrides), new_run=False)
    found = pipeline_contract(prepared.pipeline, prepared.config)
    sides = {side: identities.as_json() for side, identities in expected_identities(prepared, found).items()}
    entries = {f"{case}/{region}": sha256(points.as_json()) for (case, region), points in found.entries.items()}
    if as_json:
        click.echo(json.dumps({"identities": sides, "entries": entries}))
        return 0
    for side, identities in sides.items():
        for name, value in identities.items():
            click.echo(f"{value}  {side} {name}")
    for name, value in entries.items():
        click.echo(f"{value}  {name}")
    return 0


@contract.command()
@click.argument("left", metavar="A")
@click.argument("right", metavar="B")
@json_option
def diff(left: str, right: str, as_json: bool) -> int:
    """Name every field in which the contracts A and B differ. Exit code 1 if any does.

    Each is a pipeline (.yaml), a run directory, or a file that 'vime contract export' wrote, of any version.
    A note on stderr says where one does not follow from its own model by this version.
    """
    from rlkernel.contract.differences import differences
    from rlkernel.contract.serial import departure_sentence, departures

    one, other = read_contract_of(left), read_contract_of(right)
    for name, side in ((left, one), (right, other)):
        if departed := departures(side):
            click.echo(f"note: {name} is not what this version makes: {departure_sentence(departed)}", err=True)
    found = differences(one.as_json(), other.as_json())
    if as_json:
        for item in found:
            values = {"left": _plain(item.left), "right": _plain(item.right)}
            click.echo(json.dumps({"event": "difference", "path": list(item.path), **values}))
        return 1 if found else 0
    if not found:
        click.echo("the contracts are equal")
        return 0
    for field, cases, item in folded(found):
        where = f"{field} in {', '.join(cases)}" if cases else field
        click.echo(f"{where}: {_shown(item.left)} in {left}, {_shown(item.right)} in {right}")
    return 1


def folded(found: list[Difference]) -> list[tuple[str, list[str], Difference]]:
    """Differences by field; those of one region that are equal in several cases, or layers, become one.

    The second element lists the cases, or says which layers (whose number is N in the field).
    """
    groups: dict[tuple[str, str, str], tuple[list[str], Difference]] = {}
    layers: dict[tuple[str, str, str], list[int]] = {}
    for item in found:
        path, cases = list(item.path), []
        if path[:2] == ["semantic", "regions"] and (layer := _LAYER.match(path[2])):
            texts = (".".join(path), repr(item.left), repr(item.right))
            folded_key = (_NUMBER.sub("N", texts[0]), _NUMBER.sub("N", texts[1]), _NUMBER.sub("N", texts[2]))
            groups.setdefault(folded_key, ([], item))
            layers.setdefault(folded_key, []).append(int(layer[1]))
            continue
        if path[:2] == ["numerical_policy", "entries"]:
            case, _, region = path[2].partition("/")
            path, cases = [region, *path[3:]], [case]
        key = (".".join(path), repr(item.left), repr(item.right))
        groups.setdefault(key, ([], item))[0].extend(cases)
    return [(key[0], [_ranges(layers[key])] if key in layers else cases, item) for key, (cases, item) in groups.items()]


def _ranges(numbers: list[int]) -> str:
    """``layer 3``, ``layers 0, 2 to 27``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    shown = ", ".join(" to ".join(map(str, part)) for part in parts)
    return f"layer{'' if len(numbers) == 1 else 's'} {shown}"


def _plain(value: Any) -> Any:
    from rlkernel.contract.differences import ABSENT

    return {"absent": True} if value is ABSENT else value


def _shown(value: Any) -> str:
    from rlkernel.contract.table import readable

    if isinstance(value, str):
        return readable(value)
    return "present" if isinstance(value, dict) else str(_plain_word(value))


def _plain_word(value: Any) -> Any:
    return "none" if value is None else value


@contract.command()
@pipeline_argument
@click.argument("file", type=click.Path(dir_okay=False), metavar="FILE")
@overrides_option
@click.option("--force", is_flag=True, help="Write over FILE if it exists.")
def export(pipeline: str, file: str, overrides: tuple[str, ...], force: bool) -> int:
    """Write the contract of PIPELINE to FILE, as JSON.

    An existing FILE is kept, unless --force is given; PIPELINE itself is never written over.
    """
    from rlkernel.contract.serial import contract_text
    from vime.store.files import write_file

    text = contract_text(read_pipeline_contract(pipeline, overrides))
    target = Path(file)
    if not target.parent.is_dir():
        raise InputError(f"{file} cannot be written: there is no folder {target.parent}")
    if target.exists() and target.samefile(pipeline):
        raise InputError(f"{file} is the pipeline itself: give the contract another file")
    if not force and os.path.lexists(target):
        raise InputError(f"{file} exists already: give another file, or --force to write over it")
    write_file(target, text.encode())
    click.echo(file)
    return 0


def read_pipeline_contract(pipeline: str, overrides: tuple[str, ...] = ()) -> Contract:
    """The contract of a pipeline file; data, rewards and the run directory are not looked at.

    Raises PipelineError or ContractError, and InputError for an exported contract.
    """
    from vime.pipeline.loading import load_pipeline
    from vime.pipeline.model import resolve_model
    from vime.pipeline.problems import PipelineError
    from vime.runtime.sides import pipeline_contract

    _refuse_exported(pipeline)
    loaded = load_pipeline(pipeline, overrides)
    model, problems = resolve_model(loaded)
    if model is None and not problems:
        problems = [loaded.problem("model", "exactly one of preset and path is needed")]
    if model is None or problems:
        raise PipelineError(problems)
    return pipeline_contract(loaded.pipeline, model.config)


def _refuse_exported(pipeline: str) -> None:
    """JSON is YAML: without this, an exported contract would be called a pipeline that lacks every key."""
    from rlkernel.contract.serial import SECTIONS

    try:
        data = json.loads(Path(pipeline).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # no JSON: what is wrong with it as a pipeline is said by its reader
    if isinstance(data, dict) and set(SECTIONS) <= data.keys():
        raise InputError(
            f"{pipeline} is an exported contract, and a pipeline is needed here; exported contracts are read by "
            "'vime contract diff' alone"
        )


def read_contract_of(name: str) -> Contract:
    """The contract of a pipeline, a run directory or an exported file, the latter two of any version.

    Raises InputError or ContractError.
    """
    from rlkernel.contract.serial import SECTIONS, parse_contract, parse_contract_file
    from vime.store.names import CONTRACT_NAME

    path = Path(name)
    if path.suffix in PIPELINE_SUFFIXES:
        return read_pipeline_contract(name)
    if not path.is_dir():
        return parse_contract_file(path)
    file = path / CONTRACT_NAME
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{name} is no run directory with a contract: {file} cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise InputError(f"{file} is no contract: an object with {' and '.join(SECTIONS)} is needed")
    return parse_contract({section: data[section] for section in SECTIONS if section in data}, str(file))
