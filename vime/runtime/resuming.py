"""What is checked and said before an interrupted run goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkernel.contract.canonical import digest
from vime.errors import InputError
from vime.pipeline.schema import Pipeline, bit_relevant
from vime.timeline.event import encode_value
from vime.timeline.manager import Resumption
from vime.timeline.order import first_difference


def pipeline_digest(pipeline: Pipeline) -> str:
    """SHA-256 over the settings that can change a bit; floats as bit patterns."""
    return digest(encode_value(bit_relevant(pipeline)))


def settings_as_json(pipeline: Pipeline) -> Any:
    """The settings that can change a bit, as an event keeps them beside their digest."""
    return json.loads(json.dumps(bit_relevant(pipeline)))


def refuse_other_pipeline(path: Path, resumption: Resumption, pipeline: Pipeline) -> None:
    """Raises InputError, naming the first setting, where ``pipeline`` is not the one that the run began with.

    Settings that cannot change a bit (placement, batch sizes, threads) may change between processes.
    """
    start = resumption.start
    if start is None or start.pipeline_digest == pipeline_digest(pipeline):
        return
    found = first_difference(start.observed.get("pipeline"), settings_as_json(pipeline))
    what = "a setting that decides bits differs"
    if found is not None and start.observed.get("pipeline") is not None:
        what = f"{found[0]} was {found[1]!r} and is {found[2]!r}"
    raise InputError(
        f"{path / 'pipeline.yaml'} is not the pipeline that this run began with: {what}. A resumed run keeps its "
        "settings: restore them, or start a run of its own with 'vime run'"
    )


def refuse_other_data(path: Path, resumption: Resumption, data_digest: str) -> None:
    """Raises InputError where the data source gives other rows than those that the run began with."""
    start = resumption.start
    if start is not None and start.data_digest != data_digest:
        raise InputError(
            f"the data source of {path / 'pipeline.yaml'} gives other rows than when this run began (an edited file "
            "of data, or another version of its code): restore them, or start a run of its own with 'vime run'"
        )


def refuse_other_identities(
    path: Path, resumption: Resumption, identities: Mapping[str, Mapping[str, str]], engine_id: str
) -> None:
    """Raises InputError where this process computes another function than the one that the run began with."""
    logged = resumption.contract
    if logged is None:
        return
    for side, due, found in (
        ("trainer", logged.trainer, identities["trainer"]),
        (f"engine {engine_id}", logged.rollout, identities[engine_id]),
    ):
        for name, value in due.items():
            if found.get(name) != value:
                raise InputError(
                    f"{path} was begun with the {name} identity {value[:16]}... of the {side}; this process has "
                    f"{found.get(name, 'none')[:16]}...: another model, contract or version of vime. Resume it with "
                    "what it was begun with"
                )


def say_what_was_found(path: Path, resumption: Resumption, found: Sequence[str] = ()) -> None:
    """Name on stderr whatever was damaged, gone or put aside, and from where the run goes on in consequence."""
    for sentence in found:
        print(f"vime: {path}: {sentence}", file=sys.stderr)
    if resumption.tail is not None:
        print(f"vime: {path}: {resumption.tail.sentence()}; it was cut off", file=sys.stderr)
    for sentence in resumption.rejected:
        print(f"vime: {sentence}", file=sys.stderr)
    if resumption.rejected:
        step = resumption.checkpoint_step
        point = "its start" if step is None else f"the checkpoint of step {step}"
        print(f"vime: the run goes on from {point}, and repeats what came after it", file=sys.stderr)
