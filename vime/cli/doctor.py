"""``vime doctor``: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vime.cli.options import json_option


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
    table = Table(title=f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}")
    for name in ("", "what", "found", "to get it"):
        table.add_column(name, overflow="fold")
    for item in findings:
        mark = "[green]yes[/green]" if item.ok else "[red]NO[/red]" if item.required else "[dim]no[/dim]"
        table.add_row(mark, item.name, escape(item.found), "" if item.ok else escape(item.remedy))
    console = Console()
    console.print(table)
    if unusable:
        console.print("this machine cannot run the portable profile: " + ", ".join(item.name for item in unusable))
        return 2
    console.print("the portable profile runs here")
    return 0
