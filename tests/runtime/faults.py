"""Faults that tests plant into a run: each function alters one side, or returns one that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vime.rollout.native.weights import LabelledWeights
from vime.runtime.assembly import Sides
from vime.runtime.sides import build_engine_in_child
from vime.train.interface import ScoredSample, ScoreResult, TrainSample
from vime.types import GeneratedSample, RolloutRequest

Plant = Callable[[Sides], None]


def flip(array: np.ndarray, index: int = 3, bit: int = 0) -> None:
    """Flip one bit of a float32 array in place."""
    array.reshape(-1).view(np.uint32)[index] ^= np.uint32(1 << bit)


# ------------------------------------------------------------------------------------------ versions, caches


def does_not_commit(sides: Sides) -> None:
    """An engine that leaves the second version staged, and says so."""
    engine = sides.engine.native
    whole = engine.commit_weights
    engine.commit_weights = lambda version, digest: engine.committed() if version else whole(version, digest)


def serves_old_weights_under_the_new_label(sides: Sides) -> None:
    """The slot says version 1, digest and all; the bytes in it are those of version 0."""
    engine = sides.engine.native
    whole = engine.commit_weights

    def commit(version: int, digest: str) -> Any:
        old = engine._weights._served
        result = whole(version, digest)
        if version == 1:
            engine._weights._served = LabelledWeights(version, digest, old.weights, old.manifest)
        return result

    engine.commit_weights = commit


def computes_with_old_weights(sides: Sides) -> None:
    """Slot, label and digest are those of version 1; the model that generates is still bound to version 0."""
    engine = sides.engine.native
    whole = engine.commit_weights

    def commit(version: int, digest: str) -> Any:
        old = engine._model
        result = whole(version, digest)
        if version == 1:
            engine._model = old
        return result

    engine.commit_weights = commit


def keeps_prefix_cache(*, forge_keys: bool, forge_blocks: bool) -> Plant:
    """Cached blocks that come back after a commit has invalidated them, before the next generation: findable under the
    new version or not, and labelled as written by it or not. What is in them is stale either way."""

    def plant(sides: Sides) -> None:
        engine = sides.engine.native
        blocks, commit, generate = engine.blocks, engine.commit_weights, engine.generate
        kept: dict[int, Any] = {}

        def watched_commit(version: int, digest: str) -> Any:
            kept.clear()
            kept.update({block: key for block, (_, key) in blocks._key_of.items()})
            return commit(version, digest)

        def watched_generate(requests: Sequence[RolloutRequest]) -> Iterator[GeneratedSample]:
            version = engine.committed().version
            for block, key in kept.items():
                blocks._free.remove(block)
                blocks._unreferenced[block] = None
                label = version if forge_keys else version - 1
                blocks._key_of[block] = (label, key)
                blocks._by_key[(label, key.digest)] = block
                if forge_blocks:
                    blocks.oldest[block] = blocks.newest[block] = version
            blocks.check()
            kept.clear()
            return generate(requests)

        engine.commit_weights, engine.generate = watched_commit, watched_generate

    return plant


# ------------------------------------------------------------------------------------------ flipped bits


def flip_staged_weight(sides: Sides) -> None:
    """After the engine reported the digest of what it staged, before the commit."""
    engine = sides.engine.native
    whole = engine.stage_weights

    def stage(version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        digest = whole(version, tensors)
        flip(engine._weights._staged.weights._rows["layers.1.down_proj"].data)
        return digest

    engine.stage_weights = stage


Tensors = dict[str, torch.Tensor]


def changes_in_transit(change: Callable[[Tensors], Any]) -> Plant:
    """Something happens to the tensors between sender and receiver."""

    def plant(sides: Sides) -> None:
        whole = sides.transport.receive

        def receive(handle: Any) -> Tensors:
            tensors = {name: tensor.clone() for name, tensor in whole(handle).items()}
            change(tensors)
            return tensors

        sides.transport.receive = receive  # type: ignore[method-assign]

    return plant


def flip_in_transit(tensors: Tensors) -> None:
    """One bit of one tensor."""
    tensors["model.norm.weight"].view(torch.int32)[5] ^= 1


def swap_in_transit(tensors: Tensors) -> None:
    """Two tensors of one shape under each other's name."""
    first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


def transpose_in_transit(tensors: Tensors) -> None:
    """A tensor of another shape."""
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.contiguous()


def narrow_in_transit(tensors: Tensors) -> None:
    """A tensor of another dtype."""
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)


def flip_served_weight(sides: Sides) -> None:
    """While the engine generates."""
    after_each_sample(sides, lambda: flip(sides.engine.native._weights._served.weights._rows["layers.0.qkv_proj"].data))


def flip_kv(sides: Sides) -> None:
    """A bit of every cached key of the first layer, after the first forward pass."""
    engine = sides.engine.native

    def progress(where: Any) -> None:
        if where.steps == 1:
            keys, _ = engine._kv.pages(0)
            keys[1:].view(np.uint32)[...] ^= np.uint32(1 << 22)

    engine.progress = progress


def after_each_sample(sides: Sides, action: Callable[[], None]) -> None:
    """Run an action after the first sample of a generation."""
    engine = sides.engine.native
    whole = engine.generate

    def generate(requests: Sequence[RolloutRequest]) -> Iterator[GeneratedSample]:
        done = False
        for sample in whole(requests):
            if not done:
                action()
                done = True
            yield sample

    engine.generate = generate


def flip_trainer_rows(sides: Sides) -> None:
    """Before the trainer scores."""
    before_score(sides, lambda: flip(sides.trainer._model.weights._rows["layers.0.o_proj"].data))


def flip_trainer_columns(sides: Sides) -> None:
    """The copy that only the backward reads."""
    before_train(sides, lambda: flip(sides.trainer._model.weights._columns["layers.0.o_proj"].data))


def flip_trainer_master(sides: Sides) -> None:
    """The optimizer's float32 master."""
    before_train(sides, lambda: flip(sides.trainer._optimizer.state().master["model.norm.weight"]))


def before_score(sides: Sides, action: Callable[[], None]) -> None:
    """Run an action before every scoring forward."""
    trainer: Any = sides.trainer
    whole = trainer.score

    def score(*args: Any) -> ScoreResult:
        action()
        return whole(*args)

    trainer.score = score


def before_train(sides: Sides, action: Callable[[], None]) -> None:
    """Run an action before every training step."""
    trainer: Any = sides.trainer
    whole = trainer.train

    def train(*args: Any) -> Any:
        action()
        return whole(*args)

    trainer.train = train


# ------------------------------------------------------------------------------------------ copied arrays


def returns_rollout_arrays(*, copy: bool, work: bool, unknown: str) -> Plant:
    """A trainer that answers with the rollout's arrays.

    ``copy`` them or not; ``work``: evaluate everything honestly for the counters, and throw it away. Samples that the
    rollout does not know are evaluated honestly (``forward``), left out (``omit``) or answered wrongly (``other``).
    """

    def plant(sides: Sides) -> None:
        made: dict[Any, GeneratedSample] = {}
        engine, trainer = sides.engine.native, sides.trainer
        generate, whole = engine.generate, trainer.score

        def watched(requests: Sequence[RolloutRequest]) -> Iterator[GeneratedSample]:
            for sample in generate(requests):
                made[sample.sample_id] = sample
                yield sample

        def take(array: np.ndarray) -> np.ndarray:
            return array.copy() if copy else array

        def score(samples: Sequence[TrainSample], model: str = "policy") -> ScoreResult:
            rest = [sample for sample in samples if sample.sample_id not in made]
            honest = whole(samples if work else rest)
            own = {s.sample_id: s for s in honest.samples}
            if unknown == "omit":
                own = {}
            elif unknown == "other":
                own = {i: replace(s, logprobs=s.logprobs - np.float32(1)) for i, s in own.items()}
            answers = []
            for sample in samples:
                known = made.get(sample.sample_id)
                if known is not None:
                    arrays = (take(known.logprobs), take(known.digests), take(known.entropies))
                    answers.append(ScoredSample(sample.sample_id, *arrays))
                elif sample.sample_id in own:
                    answers.append(own[sample.sample_id])
            return replace(honest, samples=tuple(answers))

        engine.generate, trainer.score = watched, score  # type: ignore[method-assign]

    return plant


def changes_first_forward(change: Callable[[ScoreResult], ScoreResult | None]) -> Plant:
    """A trainer that shows another training forward than the one it did."""

    def plant(sides: Sides) -> None:
        trainer: Any = sides.trainer
        whole = trainer.train

        def train(*args: Any) -> Any:
            result = whole(*args)
            return replace(result, first_forward=change(result.first_forward))

        trainer.train = train

    return plant


# ------------------------------------------------------------------------------------------ samples and scores


SAMPLE_ARRAYS = ("logprobs", "digests", "entropies", "sampled_at")


def changes_samples(change: Callable[[list[GeneratedSample]], list[GeneratedSample]]) -> Plant:
    """An engine that returns something else than what it generated."""

    def plant(sides: Sides) -> None:
        engine = sides.engine.native
        whole = engine.generate
        engine.generate = lambda requests: iter(change(sorted(whole(requests), key=lambda s: s.sample_id)))

    return plant


def changes_scores(change: Callable[[ScoredSample], ScoredSample | None]) -> Plant:
    """A trainer whose scores of each sample are altered; None leaves the sample out."""

    def plant(sides: Sides) -> None:
        trainer: Any = sides.trainer
        whole = trainer.score

        def score(*args: Any) -> ScoreResult:
            result = whole(*args)
            changed = [change(sample) for sample in result.samples]
            return replace(result, samples=tuple(sample for sample in changed if sample is not None))

        trainer.score = score

    return plant


def altered(array: np.ndarray, index: int, value: float) -> np.ndarray:
    """A copy with one other element."""
    result = array.copy()
    result[index] = value
    return result


def with_array(sample: GeneratedSample, name: str, array: np.ndarray) -> GeneratedSample:
    """The sample with an array that its constructor would refuse."""
    other = replace(sample)
    object.__setattr__(other, name, array)
    return other


# ------------------------------------------------------------------------------------------ subnormals


def flush_in_worker(sides: Sides) -> None:
    """One worker thread flushes, the caller does not."""
    sides.workers._pool.submit(torch.set_flush_denormal, True).result()


def flush_while_generating(sides: Sides) -> None:
    """The calling thread begins to flush after the first sample."""
    after_each_sample(sides, lambda: torch.set_flush_denormal(True))


def build_flushing_engine(specification: Mapping[str, Any]) -> Any:
    """An engine process one of whose worker threads flushes."""
    engine = build_engine_in_child(specification)
    engine._probe.__self__._pool.submit(torch.set_flush_denormal, True).result()
    return engine
