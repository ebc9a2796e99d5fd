"""Where one token came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vime.errors import InputError
from vime.store.layout import Layout
from vime.store.run_view import RunView
from vime.timeline.events import BatchAssigned, SampleFinished, VersionPublished
from vime.timeline.log import Record
from vime.types import SampleId


def token_provenance(run: Path, sample: SampleId | str, position: int) -> dict[str, Any]:
    """The version, digest, engine and time that made a token, and the versions of the KV that it read.

    ``position`` is the absolute token index, prompt included. ``token``, ``sampled_at`` and the log-probabilities'
    bits are None until the step's arrays are written (evaluation samples have none); ``finished_at`` is always there.
    Of a sample that was evaluated several times the last is meant. Raises InputError for an unknown sample or position.
    """
    sample_id = _parse(sample)
    view = RunView.open(run)
    finished = _finished(view, sample_id)
    event = finished.event
    assert isinstance(event, SampleFinished)
    index = position - event.num_prompt_tokens
    if not 0 <= index < event.num_tokens:
        first, last = event.num_prompt_tokens, event.num_prompt_tokens + event.num_tokens - 1
        what = "a token of the prompt" if 0 <= position < event.num_prompt_tokens else "no token of the sample"
        raise InputError(f"position {position} of sample {sample_id} is {what}; generated were {first} to {last}")
    before = 0
    for made_by in event.versions:
        if index < before + made_by.count:
            break
        before += made_by.count
    digests = {r.event.version: r.event.digest for r in view.records if isinstance(r.event, VersionPublished)}
    facts: dict[str, Any] = {
        "sample": str(sample_id),
        "position": position,
        "response_index": index,
        "version": made_by.version,
        "digest": digests[made_by.version],
        "engine": event.engine,
        "kv_oldest": made_by.kv_oldest,
        "kv_newest": made_by.kv_newest,
        "finish_reason": event.finish_reason,
        "finished_at": event.observed.get("at"),
        "event": finished.seq,
        "step": None,
        "token": None,
        "sampled_at": None,
        "rollout_logprob_bits": None,
        "trainer_logprob_bits": None,
    }
    step = _step_of(view, sample_id)
    if step is not None:
        facts["step"] = step
        if step in view.announced_arrays():
            facts |= _stored(view, step, sample_id, index)
    return facts


def _parse(sample: SampleId | str) -> SampleId:
    if isinstance(sample, SampleId):
        return sample
    try:
        return SampleId.parse(sample)
    except ValueError as error:
        raise InputError(f"{sample!r} is not a sample: NAMESPACE/PROMPT/K is due, e.g. train/12/3 ({error})") from error


def _finished(view: RunView, sample_id: SampleId) -> Record:
    known = 0
    for record in reversed(view.records):
        if isinstance(record.event, SampleFinished):
            known += 1
            if record.event.sample_id == sample_id:
                return record
    raise InputError(f"sample {sample_id} was not finished in {view.path}; {known} other samples were")


def _step_of(view: RunView, sample_id: SampleId) -> int | None:
    for record in view.records:
        if isinstance(record.event, BatchAssigned) and sample_id in record.event.sample_ids:
            return record.event.step
    return None


def _stored(view: RunView, step: int, sample_id: SampleId, index: int) -> dict[str, Any]:
    arrays = view.step_arrays(step)
    layout = Layout.of(arrays)
    if layout is None or sample_id not in layout.samples:
        return {}
    row = layout.rows("token", layout.samples.index(sample_id)).start + index
    found: dict[str, Any] = {}
    if "tokens" in arrays:
        found["token"] = int(arrays["tokens"][row])
    if "sampled_at" in arrays:
        found["sampled_at"] = float(arrays["sampled_at"][row])
    for side in ("rollout", "trainer"):
        if f"{side}_logprobs" in arrays:
            bits = arrays[f"{side}_logprobs"][row : row + 1].view(np.uint32)[0]
            found[f"{side}_logprob_bits"] = f"{int(bits):08x}"
    return found
