"""Arguments and options that several commands share."""

from __future__ import annotations

import click

pipeline_argument = click.argument("pipeline", type=click.Path(dir_okay=False), metavar="PIPELINE.yaml")
overrides_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Override a key; VALUE is YAML. Repeatable."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print machine-readable JSON, one object a line.")


def run_argument(name: str = "run_directory") -> object:
    """A run directory."""
    return click.argument(name, type=click.Path(file_okay=False), metavar="RUN")
