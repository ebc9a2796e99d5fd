"""Commands that read a run: ``report``, ``provenance``, ``timeline``, ``diff``."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vime.cli.options import json_option
from vime.cli.readable import event_line, token_lines, token_text
from vime.cli.words import counted
from vime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vime.report.summary import Status
    from vime.store.run_view import RunView
    from vime.store.verify import Verification
    from vime.timeline.event import Event
    from vime.timeline.sample_events import SampleFinished
    from vime.types import SampleId, VersionRun

run_argument = click.argument("run_directory", type=click.Path(file_okay=False), metavar="RUN")


def read_run(run_directory: str) -> RunView:
    """A run as a reader sees it. Raises InputError if the folder holds none."""
    from vime.store.run_view import RunView

    view = RunView.open(Path(run_directory))
    if view.content.tail is not None:
        click.echo(f"vime: {view.content.tail.sentence()}; what comes before it is shown", err=True)
    if not view.records:
        raise InputError(f"the log of {view.path} holds no event: it was emptied, or the run died before its first one")
    return view


@click.command()
@run_argument
@json_option
def report(run_directory: str, as_json: bool) -> int:
    """Show the per-step reports of RUN. Exit code 1 if any compared token differed."""
    from vime.report.summary import RunSummary
    from vime.store.steps import evaluation_report, step_reports
    from vime.timeline.events import ContractFixed, Evaluated

    records = read_run(run_directory).records
    events = [record.event for record in records]
    steps = list(step_reports(records))
    evaluations = [evaluation_report(event) for event in events if isinstance(event, Evaluated)]
    differs = any((step["mismatch_count"] or 0) + (step["distribution_mismatch_count"] or 0) for step in steps)
    code = 1 if differs else 0
    if as_json:
        for step in steps:
            click.echo(json.dumps({"event": "step", **step}))
        for evaluation in evaluations:
            click.echo(json.dumps({"event": "evaluation", **evaluation}))
        return code
    from rich.console import Console

    from vime.report.terminal import render_terminal

    status, reason = _standing(Path(run_directory), events)
    summary = RunSummary.from_data(
        Path(run_directory).resolve().name,
        steps,
        evaluations,
        identities=next((dict(event.sides) for event in events if isinstance(event, ContractFixed)), None),
        status=status,
        reason=reason,
        native=_native_sides(events),
    )
    Console().print(render_terminal(summary))
    return code


def _standing(folder: Path, events: Sequence[Event]) -> tuple[Status, str]:
    """How a run stands, and why it is not finished."""
    from vime.store.lock import holder_of
    from vime.timeline.events import RunFinished, RunInterrupted

    if any(isinstance(event, RunFinished) for event in events):
        return "finished", ""
    if (holder := holder_of(folder)) is not None:
        return "running", f"{holder} works on it"
    # an interruption that something follows was resumed: it is not how the run stands
    if isinstance(events[-1], RunInterrupted):
        return "stopped", events[-1].reason
    return "stopped", f"it was killed; continue it with: vime resume {shlex.quote(str(folder))}"


def _native_sides(events: Iterable[Event]) -> list[str]:
    """Sides of a run whose kernels keep no contract, as its settings say."""
    from vime.timeline.events import RunStarted

    started = next((event for event in events if isinstance(event, RunStarted)), None)
    settings = (started.observed.get("pipeline") or {}) if started is not None else {}
    return [side for side, kind in settings.get("numerics", {}).items() if kind == "native"]


@click.command()
@run_argument
@click.option("--sample", "sample", metavar="S", help="A sample: NAMESPACE/PROMPT/K, as in 'train/12/3'.")
@click.option("--position", type=int, metavar="P", help="Absolute position of a token, prompt included.")
@click.option(
    "--version", "version", type=int, metavar="V", help="Weight version of a held-out sample (the last without it)."
)
@json_option
def provenance(run_directory: str, sample: str | None, position: int | None, version: int | None, as_json: bool) -> int:
    """Show weight versions and syncs of RUN, or what made one token."""
    from vime.store.provenance import provenance_lines

    if (sample is None) != (position is None):
        raise InputError("--sample and --position belong together: a token is a sample and a position")
    if version is not None and sample is None:
        raise InputError("--version chooses among the evaluations of one sample: name it with --sample")
    view = read_run(run_directory)
    if sample is not None and position is not None:
        facts = token_provenance(view, sample, position, version)
        if as_json:
            click.echo(json.dumps(facts))
        else:
            click.echo("\n".join(token_lines(facts)))
        return 0
    for line in provenance_lines(view.records):
        if as_json:
            click.echo(json.dumps(line))
            continue
        who = line["engine"] or line["who"]
        what = "published" if line["event"] == "weight_version" else line["outcome"]
        size = f"  {line['bytes']:,} bytes" if line["bytes"] is not None else ""
        took = f"  {line['seconds']:.3f} s" if line["seconds"] is not None else ""
        click.echo(
            f"version {line['version']}  {what:<11} {who:<12} {line['digest'] or line.get('reason')}{size}{took}"
        )
    return 0


def token_provenance(view: RunView, sample: str, position: int, version: int | None = None) -> dict[str, Any]:
    """Version, digests, engine and time of one generated token.

    A held-out sample is generated in every evaluation: ``version`` chooses one, the last without it; ``evaluated`` are
    the versions of all.

    ``published_digest`` is the trainer's, ``served_digest`` the engine's own recomputation. ``sampled_at`` (seconds
    since the epoch) comes from the step's arrays; evaluation samples and steps that were not closed have none.
    ``token_text`` is None where the run's tokenizer cannot be loaded from here.

    Raises:
        InputError: no such sample in the log, none of that version, or the position is not one of its generated tokens.
    """
    from vime.timeline.events import BatchAssigned, SampleFinished, SyncCommitted, VersionPublished
    from vime.types import NAMESPACES, SampleId

    try:
        wanted = SampleId.parse(sample)
    except ValueError as error:
        raise InputError(
            f"--sample {sample}: a sample is NAMESPACE/PROMPT/K, as in train/12/3; namespaces are "
            f"{' and '.join(NAMESPACES)}, and PROMPT and K are whole numbers"
        ) from error
    published: dict[int, str] = {}
    committed: dict[tuple[str, int], str] = {}
    finished: list[SampleFinished] = []
    step: int | None = None
    for record in view.records:
        event = record.event
        if isinstance(event, VersionPublished):
            published[event.version] = event.digest
        elif isinstance(event, SyncCommitted):
            committed[event.engine, event.version] = event.digest
        elif isinstance(event, SampleFinished) and event.sample_id == wanted:
            finished.append(event)
        elif isinstance(event, BatchAssigned) and wanted in event.sample_ids:
            step = event.step
    if not finished:
        raise InputError(f"the log has no finished sample {sample}")
    begun = [event.versions[0].version if event.versions else None for event in finished]
    chosen = [event for event, first in zip(finished, begun, strict=True) if version in (None, first)]
    if not chosen:
        raise InputError(f"sample {sample} was begun with version {' and '.join(map(str, begun))}, not with {version}")
    found = chosen[-1]
    index = position - found.num_prompt_tokens
    if not 0 <= index < found.num_tokens:
        first, last = found.num_prompt_tokens, found.num_prompt_tokens + found.num_tokens - 1
        raise InputError(f"sample {sample} generated positions {first} to {last}; {position} is not one of them")
    run = _version_run(found, index)
    arrays = _token_arrays(view, step, wanted, index)
    return {
        "sample": sample,
        "position": position,
        "step": step,
        "version": run.version,
        "published_digest": published.get(run.version),
        "served_digest": committed.get((found.engine, run.version)),
        "engine": found.engine,
        "kv_versions": [run.kv_oldest, run.kv_newest],
        "finish_reason": found.finish_reason,
        **({"evaluated": begun} if wanted.namespace == "eval" else {}),
        **arrays,
        "token_text": token_text(view.path, arrays["token_id"]),
    }


def _version_run(sample: SampleFinished, index: int) -> VersionRun:
    """The version run that a generated token belongs to."""
    end = 0
    for run in sample.versions:
        end += run.count
        if index < end:
            return run
    raise InputError(f"sample {sample.sample_id} has versions for {end} tokens, and token {index} is asked for")


def _token_arrays(view: RunView, step: int | None, wanted: SampleId, index: int) -> dict[str, Any]:
    """What the step's arrays hold of one token: id, log-probabilities of both sides as bits, time."""
    from vime.store.layout import Layout

    nothing = dict.fromkeys(("token_id", "rollout_logprob_bits", "trainer_logprob_bits", "sampled_at"))
    if step is None or step not in view.announced_arrays():
        return nothing
    arrays = view.step_arrays(step)
    layout = Layout.of(arrays)
    if layout is None or wanted not in layout.samples:
        return nothing
    at = layout.response_offsets[layout.samples.index(wanted)] + index

    def bits(name: str) -> str | None:
        return f"{int(arrays[name].view('u4')[at]):08x}" if name in arrays else None

    return {
        "token_id": int(arrays["tokens"][at]),
        "rollout_logprob_bits": bits("rollout_logprobs"),
        "trainer_logprob_bits": bits("trainer_logprobs"),
        "sampled_at": float(arrays["sampled_at"][at]) if "sampled_at" in arrays else None,
    }


@click.command()
@run_argument
@click.option("--type", "kinds", multiple=True, metavar="TYPE", help="Only events of this type. Repeatable.")
@click.option("--verify", is_flag=True, help="List nothing; check every invariant, array, checkpoint and file.")
@json_option
def timeline(run_directory: str, kinds: tuple[str, ...], verify: bool, as_json: bool) -> int:
    """List the events of RUN, or verify it (--verify)."""
    from vime.pipeline.problems import nearest_name
    from vime.timeline.events import EVENT_TYPES

    known = [kind.type for kind in EVENT_TYPES]
    for kind in kinds:
        if kind not in known:
            near = nearest_name(kind, known)
            raise InputError(f"there is no event type {kind!r}" + (f" (did you mean {near!r}?)" if near else ""))
    if verify and kinds:
        raise InputError("--verify checks the whole run and lists no events: leave --type out, or call it twice")
    records = read_run(run_directory).records
    if verify:
        return _print_verdict(run_directory, as_json)
    for record in records:
        if kinds and record.event.type not in kinds:
            continue
        if as_json:
            fields = {**record.event.logical(), **record.event.deployment()}
            click.echo(json.dumps({"seq": record.seq, "type": record.event.type, "hash": record.hash, **fields}))
        else:
            click.echo(event_line(record))
    return 0


def _print_verdict(run_directory: str, as_json: bool) -> int:
    """What ``timeline --verify`` found, on standard output; exit code 1 if anything is wrong."""
    from vime.store.verify import verify_run

    found = verify_run(Path(run_directory))
    if as_json:
        click.echo(json.dumps({"event": "verified", "ok": found.ok, **dataclasses.asdict(found)}))
    else:
        click.echo("\n".join(found.problems or _verified(found)))
    return 0 if found.ok else 1


def _verified(found: Verification) -> Iterator[str]:
    """What was verified, and what was not."""
    stored = f"the arrays of {counted(found.steps, 'step')} and {counted(found.checkpoints, 'checkpoint')} are intact"
    yield f"{counted(found.events, 'event')}, every invariant holds; {stored}"
    if found.files:
        yield f"{', '.join(found.files)}: the bytes that the log announced"
    if found.finished:
        yield (
            "steps.jsonl and provenance.jsonl say what the log says. report.html is a view for people and is not "
            "verified; 'vime resume' writes that of a finished run anew"
        )
    else:
        yield "the run is not finished: steps.jsonl, provenance.jsonl and report.html were not looked at"


@click.command()
@click.argument("left", type=click.Path(file_okay=False), metavar="RUN")
@click.argument("right", type=click.Path(file_okay=False), metavar="RUN")
@json_option
def diff(left: str, right: str, as_json: bool) -> int:
    """Compare two runs and name the first bit in which they differ.

    Its event, array, step and token are named too. Exit code 1 if any differs. Wall times, host, process ids, paths
    and deployment are ignored.
    """
    from vime.cli.differences import difference_lines
    from vime.timeline.diff import diff_runs
    from vime.timeline.events import RunFinished

    unfinished = [folder for folder in (left, right) if not isinstance(read_run(folder).records[-1].event, RunFinished)]
    difference = diff_runs(Path(left), Path(right))
    if as_json:
        data = dataclasses.asdict(difference) if difference is not None else None
        answer = {"equal": difference is None, "finished": not unfinished, "difference": data}
        click.echo(json.dumps(answer, default=str))
    else:
        equal = "the runs are equal, bit for bit"
        if unfinished:
            equal += f", as far as they go: {' and '.join(unfinished)} did not finish"
        lines = [equal] if difference is None else difference_lines(difference)
        click.echo("\n".join(lines))
    return 0 if difference is None else 1
