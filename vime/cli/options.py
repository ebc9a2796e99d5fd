"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Any

import click

from rlkernel.names import hint

pipeline_argument = click.argument("pipeline", type=click.Path(dir_okay=False), metavar="PIPELINE.yaml")
overrides_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Override a key; VALUE is YAML. Repeatable."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print machine-readable JSON, one object a line.")


class NamedChoice(click.Choice):  # type: ignore[type-arg]
    """One of some names; a wrong one is refused with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The chosen name. Raises click.BadParameter for another one."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            said = f"{error.message.rstrip('.')}{hint(str(value), self.choices)}"
            raise click.BadParameter(said, ctx=ctx, param=param) from error


def run_argument(name: str = "run_directory") -> object:
    """A run directory."""
    return click.argument(name, type=click.Path(file_okay=False), metavar="RUN")
