"""Events keep every bit on their way through JSON."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timeline.building import A, history
from vime.timeline.event import decode_event, decode_value, encode_value, to_json
from vime.timeline.events import EVENT_TYPES, Decision, RewardGiven, RunStarted, SampleFinished
from vime.types import GeneratedSample, VersionRun

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["f64:x", "str:", "f64:"]),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def bits(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, tuple):
        return tuple(bits(v) for v in value)
    return {k: bits(v) for k, v in value.items()} if isinstance(value, dict) else (type(value), value)


@given(PLAIN)
@settings(max_examples=150, deadline=None)
def test_values_round_trip(value: Any) -> None:
    assert bits(decode_value(json.loads(to_json(encode_value(value))))) == bits(value)


def test_events_round_trip() -> None:
    for event in history():
        parts = [json.loads(to_json(part)) for part in (event.logical(), event.deployment(), dict(event.observed))]
        back = decode_event(type(event), *parts)
        assert back.logical() == event.logical() and back.deployment() == event.deployment()


def test_types_have_one_name_each() -> None:
    names = [kind.type for kind in EVENT_TYPES]
    assert len(set(names)) == len(names) and all(names)


def test_floats_are_bits() -> None:
    event = RewardGiven(sample_id=A, reward=-0.0, source="x", components={"nan": float("nan")})
    assert event.logical()["reward"] == "f64:8000000000000000"
    assert event.logical() != replace(event, reward=0.0).logical()
    assert math.isnan(decode_value(event.logical()["components"]["nan"]))
    assert encode_value(np.float32(0.1)) == encode_value(float(np.float32(0.1)))


def test_unknown_and_missing_fields_are_refused() -> None:
    good = Decision(kind="k", key="1", value=2).logical()
    with pytest.raises(ValueError, match=r"no logical fields \['extra'\]"):
        decode_event(Decision, {**good, "extra": 1}, {}, {})
    with pytest.raises(ValueError, match=r"lacks the fields \['engines'\]"):
        decode_event(RunStarted, {"run_seed": 1, "pipeline_digest": "p", "steps": 1}, {}, {})
    with pytest.raises(TypeError, match="only plain data"):
        Decision(kind="k", key="1", value=object()).logical()


def test_content_of_a_sample_counts_every_bit() -> None:
    def sample(**kwargs: Any) -> GeneratedSample:
        values: dict[str, Any] = {
            "sample_id": A,
            "prompt_token_ids": (1, 2),
            "token_ids": (3, 4),
            "logprobs": np.asarray([-1, -2], np.float32),
            "digests": np.zeros((2, 2), np.uint64),
            "entropies": np.asarray([0.5, 0.25], np.float32),
            "sampled_at": np.zeros(2),
            "versions": (VersionRun(2, 0, 0, 0),),
            "finish_reason": "stop",
            "engine_id": "e0",
        }
        return GeneratedSample(**{**values, **kwargs})

    first = SampleFinished.of(sample())
    same = SampleFinished.of(sample(sampled_at=np.ones(2), preemptions=3, engine_id="e1"))
    assert first.logical() == same.logical() and same.observed["preemptions"] == 3
    for change in (
        {"token_ids": (3, 5)},
        {"logprobs": np.asarray([-1, np.nextafter(np.float32(-2), np.float32(0))], np.float32)},
        {"digests": np.ones((2, 2), np.uint64)},
        {"entropies": np.asarray([0.5, -0.25], np.float32)},
    ):
        assert SampleFinished.of(sample(**change)).content_digest != first.content_digest
