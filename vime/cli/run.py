"""``vime run`` and ``vime resume``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vime.cli.exits import exit_code
from vime.cli.options import json_option, overrides_option, pipeline_argument
from vime.errors import InputError, Interrupted

if TYPE_CHECKING:
    from vime.pipeline.loading import LoadedPipeline
    from vime.pipeline.prepare import Prepared


@click.command()
@pipeline_argument
@overrides_option
@click.option("--fresh", is_flag=True, help="Move a run that is in the way aside (nothing is deleted).")
@json_option
def run(pipeline: str, overrides: tuple[str, ...], fresh: bool, as_json: bool) -> int:
    """Run PIPELINE from its start."""
    from vime.pipeline.loading import read_pipeline
    from vime.pipeline.prepare import prepare

    with _last_line(as_json):
        loaded = read_pipeline(pipeline, overrides)
        if fresh:
            prepare(loaded, new_run=False)  # nothing is moved for a pipeline that would not start
            moved = set_aside(Path(loaded.pipeline.run_directory))
            if moved is not None:
                click.echo(f"vime: the run that was there is now {moved}", err=True)
        return _drive(prepare(loaded), as_json, resume=False)


@click.command()
@click.argument("run_directory", type=click.Path(file_okay=False), metavar="RUN")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY.KEY=VALUE",
    help="Override a key that decides no bit (threads, max_num_seqs, ...) for this process. Repeatable.",
)
@json_option
def resume(run_directory: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Continue an interrupted run.

    RUN is its folder. It ends with the bits of a run that was not interrupted.
    """
    from vime.pipeline.prepare import prepare

    folder = str(Path(run_directory).absolute())
    with _last_line(as_json), _where_it_began(Path(folder)):
        prepared = prepare(load_to_resume(folder, overrides), new_run=False)
        return _drive(prepared, as_json, resume=True, shown=run_directory)


@contextmanager
def _where_it_began(run_directory: Path) -> Iterator[None]:
    """The folder in which a run was started: its pipeline's relative paths, and those that user functions open, are
    relative to it. Where it is gone, or the log does not know, the current folder is kept."""
    from vime.timeline.events import RunStarted
    from vime.timeline.log import read_start
    from vime.timeline.manager import LOG_NAME

    started = read_start(run_directory / LOG_NAME)  # whoever opens the run next says what is wrong with it
    begun = started.observed.get("working_directory") if isinstance(started, RunStarted) else None
    here = os.getcwd()
    if not isinstance(begun, str) or begun == here:
        yield
        return
    if not os.path.isdir(begun):
        click.echo(f"vime: the run was started in {begun}, which is gone: relative paths begin in {here}", err=True)
        yield
        return
    with chdir(begun):
        yield


def load_to_resume(run_directory: str, overrides: Sequence[str]) -> LoadedPipeline:
    """The pipeline of a run, with overrides of keys that decide no bit.

    Raises InputError where there is no run, and for an override that a resumed run cannot take.
    """
    from vime.pipeline.loading import load_pipeline
    from vime.pipeline.schema import bit_relevant
    from vime.timeline.order import first_difference

    file = Path(run_directory) / "pipeline.yaml"
    if not file.is_file():
        raise InputError(f"{run_directory} holds no run: {file} is missing")
    begun = load_pipeline(file)
    moved = []
    if Path(begun.pipeline.run_directory).resolve() != Path(run_directory).resolve():
        # the folder was moved, or the command runs in another one
        moved = [f"run_directory={_quoted(str(Path(run_directory).resolve()))}"]
    for override in overrides:
        key = override.partition("=")[0]
        if key == "run_directory":
            raise InputError(f"--set {override}: the folder of a resumed run is the one that is named, {run_directory}")
        changed = load_pipeline(file, [override])
        found = first_difference(bit_relevant(begun.pipeline), bit_relevant(changed.pipeline))
        if found is not None:
            raise InputError(
                f"--set {override}: {found[0]} was {found[1]!r} when this run began, and a resumed run keeps every "
                "setting that decides bits or which samples count. Start a run of its own with 'vime run'; what may "
                "change is listed in docs/pipeline.md under 'Keys that change no bit'"
            )
    return load_pipeline(file, [*overrides, *moved])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def _last_line(as_json: bool) -> Iterator[None]:
    """With ``--json``, a run that ends with an error ends with an object too: ``finished``, the sentence, the code."""
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads any more
    except BaseException as error:
        if as_json:
            from vime.pipeline.problems import PipelineError

            code = exit_code(error)
            data: dict[str, object] = {
                "event": "finished",
                "status": "interrupted" if code == 3 else "failed",
                "exit_code": code,
                "message": str(error) or type(error).__name__,
            }
            if isinstance(error, PipelineError):
                data["problems"] = [problem.as_json() for problem in error.problems]
            click.echo(json.dumps(data))
        raise


def _drive(prepared: Prepared, as_json: bool, *, resume: bool, shown: str | None = None) -> int:
    """Run or resume. ``shown`` is how the user names the run's folder, where the pipeline names it otherwise."""
    from vime.cli.progress import observing
    from vime.pipeline.machine import is_finished
    from vime.runtime.run_loop import run as run_pipeline

    folder = shlex.quote(shown or prepared.pipeline.run_directory)

    def hint() -> str:
        if (Path(prepared.pipeline.run_directory) / "timeline.jsonl").is_file():
            return f"continue it with: vime resume {folder}"
        return f"nothing was written to {folder} yet: start the run again"

    with observing(as_json) as observer:
        if is_finished(Path(prepared.pipeline.run_directory)):
            click.echo("vime: this run is finished; its log is read, and its report written again", err=True)
        else:
            observer.preparing()
        try:
            outcome = run_pipeline(prepared, resume=resume, observer=observer)
        except Interrupted as error:
            raise Interrupted(f"{error}; {hint()}") from error
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {hint()}") from None
        except BrokenPipeError:
            click.echo(f"vime: nobody reads the output any more, so the run stopped; {hint()}", err=True)
            raise
        if not observer.done:
            observer.finished(outcome)  # nothing was left to do
    if outcome.status != "completed":
        click.echo(f"vime: {outcome.message}; see: vime report {folder}", err=True)
    return outcome.exit_code


def set_aside(folder: Path) -> Path | None:
    """Rename a run's folder to the first free ``NAME.N``; returns the new name, None if there was nothing to move.

    Raises InputError for a run that a process works on, and for a folder that holds something else than a run.
    """
    from vime.store.lock import RunLock
    from vime.timeline.manager import LOG_NAME

    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    if not (folder / LOG_NAME).is_file():
        raise InputError(
            f"{folder} is not empty and holds no run ({LOG_NAME} is missing): --fresh moves runs aside, nothing else. "
            "Name another run_directory"
        )
    try:
        lock = RunLock(folder)
    except InputError as error:
        raise InputError(f"--fresh moves nothing: {error}") from error
    try:
        number = 1
        while (target := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(target)
    finally:
        lock.close()
    return target
