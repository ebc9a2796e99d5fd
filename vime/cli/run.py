"""``vime run`` and ``vime resume``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vime.cli.options import json_option, overrides_option, pipeline_argument
from vime.errors import Interrupted

if TYPE_CHECKING:
    from vime.pipeline.prepare import Prepared

if TYPE_CHECKING:
    from vime.pipeline.prepare import Prepared


@click.command()
@pipeline_argument
@overrides_option
@click.option("--fresh", is_flag=True, help="Move a run that is in the way aside (nothing is deleted).")
@json_option
def run(pipeline: str, overrides: tuple[str, ...], fresh: bool, as_json: bool) -> int:
    """Run PIPELINE from its start."""
    from vime.pipeline.loading import load_pipeline
    from vime.pipeline.prepare import prepare

    loaded = load_pipeline(pipeline, overrides)
    if fresh:
        prepare(loaded, new_run=False)  # nothing is moved for a pipeline that would not start
        moved = set_aside(Path(loaded.pipeline.run_directory))
        if moved is not None:
            click.echo(f"vime: the run that was there is now {moved}", err=True)
    return _drive(prepare(loaded), as_json, resume=False)


@click.command()
@click.argument("run_directory", type=click.Path(file_okay=False), metavar="RUN")
@json_option
def resume(run_directory: str, as_json: bool) -> int:
    """Continue the interrupted run in the folder RUN; it ends with the bits of an uninterrupted one."""
    from vime.errors import InputError
    from vime.pipeline.loading import load_pipeline
    from vime.pipeline.prepare import prepare

    file = Path(run_directory) / "pipeline.yaml"
    if not file.is_file():
        raise InputError(f"{run_directory} holds no run: {file} is missing")
    loaded = load_pipeline(file)
    if Path(loaded.pipeline.run_directory).resolve() != Path(run_directory).resolve():
        # the folder was moved, or the command runs in another one
        loaded = load_pipeline(file, [f"run_directory={_quoted(str(Path(run_directory).resolve()))}"])
    return _drive(prepare(loaded, new_run=False), as_json, resume=True)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _drive(prepared: Prepared, as_json: bool, *, resume: bool) -> int:
    from vime.cli.progress import observing
    from vime.runtime.run_loop import run as run_pipeline

    folder = prepared.pipeline.run_directory
    with observing(as_json) as observer:
        try:
            outcome = run_pipeline(prepared, resume=resume, observer=observer)
        except Interrupted as error:
            raise Interrupted(f"{error}; {_hint(folder)}") from error
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {_hint(folder)}") from None
        if not observer.done:
            observer.finished(outcome)  # nothing was left to do
    if outcome.status != "completed":
        click.echo(f"vime: {outcome.message}; see: vime report {folder}", err=True)
    return outcome.exit_code


def _hint(folder: str) -> str:
    if (Path(folder) / "timeline.jsonl").is_file():
        return f"continue it with: vime resume {folder}"
    return f"nothing was written to {folder} yet: start the run again"


def set_aside(folder: Path) -> Path | None:
    """Rename a folder to the first free ``NAME.N``; returns the new name, None if there was nothing to move."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return target
