"""A whole model on a CPU against transformers: forward, batched generation, training forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common import Clock, Comparison, alternate
from benchmarks.models import Models, sequences_batch
from rlkernel.ops.gradients import Gradients
from vime.types import RolloutRequest, SampleId, SamplingParams

FORWARD_THRESHOLD, DECODE_THRESHOLD = 0.8, 1.0
GENERATE_REPEATS = 3  # each has 63 decode steps on either side
SEQUENCES, PROMPT, NEW_TOKENS, BLOCK_SIZE = 64, 48, 64, 64
TRAINED, TRAINED_LENGTH, TRAINED_PROMPT = 4, 200, 50


def _tokens(models: Models, count: int, length: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Random token ids int64 [count, length]; speed does not depend on which they are."""
    return np.random.default_rng(seed).integers(0, models.loaded.config.vocab_size, (count, length))


def forward(models: Models, repeats: int) -> Iterator[Comparison]:
    """1,024 tokens in one sequence, and in eight."""
    runner, peer = models.runner, models.peer
    for count, length in ((1, 1024), (8, 128)):
        tokens = _tokens(models, count, length, seed=count)
        batch, targets, ids = sequences_batch(tokens), np.roll(tokens, -1, axis=1).reshape(-1), torch.from_numpy(tokens)

        def ours(batch: Any = batch, targets: Any = targets) -> object:
            return runner.logprobs(runner.hidden(batch, None, "trainer_score"), targets, 1.0, "trainer_score")

        def theirs(ids: torch.Tensor = ids) -> object:
            with torch.no_grad():
                return peer(ids, use_cache=False).logits

        times = alternate(ours, theirs, repeats, clock=models.clock)
        yield Comparison(
            f"forward, {count} x {length} tokens",
            "logits of every token, and from them log-probability, entropy and distribution digest of every token",
            "logits of every token",
            *times,
            work=count * length,
            unit="tokens",
            threshold=FORWARD_THRESHOLD,
        )


class _StepTimes:
    """Seconds between the ends of successive steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.marks: list[float] = []

    def mark(self, *_: object) -> None:
        self.marks.append(self._clock())

    def take(self) -> list[float]:
        """Durations since the last call: one a decode step (the first mark ends the prefill)."""
        marks, self.marks = self.marks, []
        return [after - before for before, after in itertools.pairwise(marks)]


def decode(models: Models, repeats: int) -> Iterator[Comparison]:
    """64 sequences: whole calls (prompts included), and single decode steps of the same calls."""
    from transformers import LogitsProcessor, LogitsProcessorList

    prompts = _tokens(models, SEQUENCES, PROMPT, seed=64)
    ids = torch.from_numpy(prompts)
    peer, engine = models.peer, models.engine(SEQUENCES, PROMPT + NEW_TOKENS, BLOCK_SIZE)
    our_steps, peer_steps = _StepTimes(models.clock), _StepTimes(models.clock)
    engine.progress = our_steps.mark
    params = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS)
    requests = [
        RolloutRequest(SampleId("train", index, 0), tuple(prompt.tolist()), params)
        for index, prompt in enumerate(prompts)
    ]

    class Marker(LogitsProcessor):  # type: ignore[misc]
        """Called once a step, between the forward and the draw."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            peer_steps.mark()
            return scores

    def ours() -> None:
        samples = list(engine.generate(requests))
        produced = sum(len(sample.token_ids) for sample in samples)
        if produced != SEQUENCES * NEW_TOKENS:
            raise RuntimeError(f"the engine produced {produced} tokens instead of {SEQUENCES * NEW_TOKENS}")

    def theirs() -> None:
        with torch.no_grad():
            found = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                use_cache=True,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([Marker()]),
            )
        if tuple(found.shape) != (SEQUENCES, PROMPT + NEW_TOKENS):
            raise RuntimeError(f"transformers produced {tuple(found.shape)}")

    ours()
    theirs()
    our_steps.take()
    peer_steps.take()
    times = alternate(ours, theirs, min(repeats, GENERATE_REPEATS), warmups=0, clock=models.clock)
    sampled = "a token drawn from the full distribution at temperature 1 with prompts of 48 tokens, 64 new tokens each"
    yield Comparison(
        f"generate, {SEQUENCES} sequences",
        f"the engine's generate: {sampled}, with log-probability, entropy and distribution digest of every token",
        f"transformers' generate with its KV cache: {sampled}",
        *times,
        work=SEQUENCES * NEW_TOKENS,
        unit="tokens",
        threshold=DECODE_THRESHOLD,
    )
    yield Comparison(
        f"decode step, {SEQUENCES} sequences",
        "one engine step of the calls above, prefill left out",
        "one step of generate of the calls above, from draw to draw, prefill left out",
        tuple(our_steps.take()),
        tuple(peer_steps.take()),
        work=SEQUENCES,
        unit="tokens",
        threshold=DECODE_THRESHOLD,
    )
    engine.close()


def training(models: Models, repeats: int) -> Iterator[Comparison]:
    """One micro-batch: forward, loss on the log-probabilities of the responses, backward into weight gradients."""
    runner, peer = models.trainer, models.peer
    config = models.loaded.config
    tokens = _tokens(models, TRAINED, TRAINED_LENGTH, seed=4)
    inputs, ids = sequences_batch(tokens[:, :-1].copy()), torch.from_numpy(tokens)
    length = TRAINED_LENGTH - 1
    within = np.arange(TRAINED_PROMPT - 1, length)
    rows = (np.arange(TRAINED)[:, None] * length + within).reshape(-1)
    targets = tokens[:, TRAINED_PROMPT:].reshape(-1)
    weight = np.float32(-1.0 / len(targets))
    tied = "model.embed_tokens.weight" if config.tied_embeddings else None
    gradients = Gradients(config.weight_shapes(), tied_embedding=tied)

    def ours() -> None:
        tape = runner.forward(inputs, rows, targets, 1.0)
        runner.backward(tape, np.full(len(targets), weight, np.float32), gradients)

    def theirs() -> None:
        logits = peer(ids[:, :-1], use_cache=False).logits[:, TRAINED_PROMPT - 1 :]
        taken = torch.log_softmax(logits, -1).gather(-1, ids[:, TRAINED_PROMPT:, None])
        (taken.sum() * float(weight)).backward()

    peer.zero_grad(set_to_none=False)
    times = alternate(ours, theirs, repeats, clock=models.clock)
    peer.zero_grad(set_to_none=True)
    yield Comparison(
        f"forward and backward, {TRAINED} x {TRAINED_LENGTH}",
        "log-probability, entropy and digest of the response tokens; gradients of every weight as continued chains",
        "log_softmax and gather of the response tokens; autograd into every weight's .grad",
        *times,
        work=TRAINED * length,
        unit="tokens",
        threshold=None,
    )
