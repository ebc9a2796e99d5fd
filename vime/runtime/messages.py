"""Messages between the run loop and an engine in another process: a JSON header, then raw array bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.train.interface import TrainSample
from vime.types import GeneratedSample, RolloutRequest, SampleId, SamplingParams, VersionRun

Arrays = Mapping[str, NDArray[Any]]
_ARRAYS = {"logprobs": np.float32, "digests": np.uint64, "entropies": np.float32, "sampled_at": np.float64}


def send(connection: Connection, header: Mapping[str, Any], arrays: Arrays | None = None) -> None:
    """Send a header and its arrays."""
    arrays = arrays or {}
    described = {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in arrays.items()}
    connection.send_bytes(json.dumps({**header, "arrays": described}).encode())
    for array in arrays.values():
        connection.send_bytes(np.ascontiguousarray(array).tobytes())


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Receive one message. Raises EOFError when the other side is gone."""
    header = json.loads(connection.recv_bytes())
    arrays = {}
    for name, described in header.pop("arrays").items():
        raw = np.frombuffer(connection.recv_bytes(), dtype=described["dtype"])
        arrays[name] = raw.reshape(described["shape"])
    return header, arrays


def request_to_json(request: RolloutRequest) -> dict[str, Any]:
    """Plain data of a request."""
    params = vars(request.params)
    return {
        "sample_id": str(request.sample_id),
        "prompt": list(request.prompt_token_ids),
        "params": {name: list(v) if isinstance(v, tuple) else v for name, v in params.items()},
    }


def request_from_json(data: Mapping[str, Any]) -> RolloutRequest:
    """Inverse of :func:`request_to_json`."""
    params: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data["params"].items()}
    return RolloutRequest(SampleId.parse(data["sample_id"]), tuple(data["prompt"]), SamplingParams(**params))


def sample_to_message(sample: GeneratedSample) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and arrays of a finished sample."""
    header = {
        "sample_id": str(sample.sample_id),
        "prompt": list(sample.prompt_token_ids),
        "tokens": list(sample.token_ids),
        "versions": [[run.count, run.version, run.kv_oldest, run.kv_newest] for run in sample.versions],
        "finish_reason": sample.finish_reason,
        "engine_id": sample.engine_id,
        "text": sample.text,
        "preemptions": sample.preemptions,
        "cached_prompt_tokens": sample.cached_prompt_tokens,
        "extra": dict(sample.extra),
    }
    return header, {name: getattr(sample, name) for name in _ARRAYS}


def sample_from_message(header: Mapping[str, Any], arrays: Arrays) -> GeneratedSample:
    """Inverse of :func:`sample_to_message`."""
    return GeneratedSample(
        sample_id=SampleId.parse(header["sample_id"]),
        prompt_token_ids=tuple(header["prompt"]),
        token_ids=tuple(header["tokens"]),
        versions=tuple(VersionRun(*run) for run in header["versions"]),
        finish_reason=header["finish_reason"],
        engine_id=header["engine_id"],
        text=header["text"],
        preemptions=header["preemptions"],
        cached_prompt_tokens=header["cached_prompt_tokens"],
        extra=header["extra"],
        **{name: arrays[name] for name in _ARRAYS},
    )


def train_sample_to_json(sample: TrainSample) -> dict[str, Any]:
    """Identity and tokens of a sequence that is to be evaluated."""
    return {
        "sample_id": str(sample.sample_id),
        "prompt": list(sample.prompt_token_ids),
        "tokens": list(sample.token_ids),
    }


def train_sample_from_json(data: Mapping[str, Any]) -> TrainSample:
    """Inverse of :func:`train_sample_to_json`; every token counts."""
    tokens = tuple(data["tokens"])
    mask = np.ones(len(tokens), np.bool_)
    return TrainSample(SampleId.parse(data["sample_id"]), tuple(data["prompt"]), tokens, mask)
