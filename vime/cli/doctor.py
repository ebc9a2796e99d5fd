"""``vime doctor``: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime.cli.options import json_option

if TYPE_CHECKING:
    from vime.doctor import Finding


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Say what this machine can do. Exit code 2 if it cannot run the portable profile."""
    from vime.doctor import examine

    findings = examine()
    unusable = [item for item in findings if item.required and not item.ok]
    if as_json:
        for item in findings:
            click.echo(json.dumps(asdict(item)))
        return 2 if unusable else 0
    console = Console()
    system = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    console.print(f"vime {importlib.metadata.version('vime')} on {system}", highlight=False)
    console.print(_table(findings))
    if unusable:
        console.print("this machine cannot run the portable profile: " + ", ".join(item.name for item in unusable))
        return 2
    console.print("the portable profile runs here")
    return 0


def _table(findings: Sequence[Finding]) -> Table:
    """What was found, and under it how to get what is missing: readable at any width."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in findings:
        text = Text(item.found.replace(str(Path.home()), "~"))
        if not item.used or not item.ok:
            text.append(f"\n{item.remedy}", style="dim")
        table.add_row(_mark(item), item.name, text)
    return table


def _mark(item: Finding) -> Text:
    if not item.used:
        return Text("not yet", style="dim")
    if item.ok:
        return Text("yes", style="green")
    return Text("NO" if item.required else "no", style="red" if item.required else "dim")
