"""The embedded trainer: scores, losses, gradients and updates with the model that the contract describes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.claims import Topology
from rlkernel.contract.identity import Identities
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.reference.loss import LossInputs
from rlkernel.verify.admission.first_use_step import StepFirstUse
from vime.errors import InputError
from vime.mismatch.localise import Boundary, trace_sample
from vime.train.batching import check_sample, check_vocabulary, flatten, micro_batches, update_batches
from vime.train.interface import ScoredSample, ScoreResult, TrainResult, TrainSample
from vime.train.losses import LossConfig, TokenLosses, first_nonfinite, step_weights, summarise, token_losses
from vime.train.native import state
from vime.train.native.backend import CpuBackend, TrainerBackend
from vime.train.native.model import GradientShape, TrainableModel, count_forward, evaluate, scored, token_batch
from vime.train.native.optimizer import OptimizerConfig
from vime.train.native.redraw import redrawn
from vime.train.ordered import ordered_mean
from vime.types import SamplingParams


@dataclass(frozen=True)
class TrainerConfig:
    """How a step is trained.

    ``micro_batch_samples`` and ``activation_checkpointing`` change no bit. ``data_parallel_leaves`` is the claimed
    dp degree of the contract: gradients reduce over that many blocks of samples.
    """

    optimizer: OptimizerConfig
    loss: LossConfig = field(default_factory=LossConfig)
    temperature: float = 1.0
    updates_per_step: int = 1
    micro_batch_samples: int = 64
    activation_checkpointing: bool = False
    data_parallel_leaves: int = 1

    def __post_init__(self) -> None:
        for name in ("updates_per_step", "micro_batch_samples", "data_parallel_leaves"):
            if getattr(self, name) < 1:
                raise InputError(f"trainer {name} = {getattr(self, name)}: at least 1 is needed")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InputError(f"trainer temperature = {self.temperature!r}: a finite number above 0 is needed")


@dataclass(frozen=True)
class _UpdateOutcome:
    losses: list[TokenLosses]
    scores: list[ScoredSample]
    grad_norm: float
    learning_rate: float


class NativeTrainer:
    """A trainer in this process.

    Args:
        model: bound to ``tensors``; its weights are updated in place after every optimizer update.
        tensors: initial logical tensors in the contract's dtype; copied.
        reference: a model bound to the reference weights; needed with a KL term, never updated.
        identities: of the contract and this deployment.
        backend: where the tensors live and what the optimizer step runs on; the CPU with ``workers`` without one.
        first_use: confirms the first optimizer step of this process on live operands; without one nothing does.
    """

    def __init__(
        self,
        model: TrainableModel,
        tensors: Mapping[str, torch.Tensor],
        config: TrainerConfig,
        identities: Identities,
        *,
        dtype: Literal["float32", "bfloat16"],
        workers: Workers,
        reference: TrainableModel | None = None,
        backend: TrainerBackend | None = None,
        first_use: StepFirstUse | None = None,
    ) -> None:
        if config.loss.needs_reference and reference is None:
            raise InputError(f"loss kl: {config.loss.kl} compares with a reference model, and the trainer got none")
        self.config = config
        self._model, self._reference = model, reference
        self._identities, self._dtype = identities, dtype
        self._backend: TrainerBackend = backend if backend is not None else CpuBackend(workers)
        self._optimizer = self._backend.optimizer(config.optimizer, tensors, dtype, model.evidence)
        self._first_use = self._optimizer.first_use = first_use
        self._gradient_shape = GradientShape.of(model.definition, config.data_parallel_leaves)
        self._steps = 0
        self._tensors = self._backend.copies(tensors)
        model.weights.update(self._tensors)

    @property
    def steps(self) -> int:
        """Training steps done."""
        return self._steps

    @property
    def updates(self) -> int:
        """Optimizer updates done."""
        return self._optimizer.updates

    def identities(self) -> Identities:
        """Identities of the contract that this trainer computes."""
        return self._identities

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Logical tensors in the contract's dtype, as copies: nobody outside can change the trainer's."""
        return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def manifest_digest(self) -> str:
        """Digest recomputed from the bytes that the kernels read.

        Raises NumericsError if the logical tensors (which are published) have another one.
        """
        packed = self._model.weights.manifest_digest()
        logical = self._backend.manifest_digest(self._tensors, self._dtype)
        if packed != logical:
            raise NumericsError(
                f"the trainer's packed weights have digest {packed}, the tensors that it publishes have {logical}: "
                "bytes changed between packing and now"
            )
        return packed

    def score(self, samples: Sequence[TrainSample], model: Literal["policy", "reference"] = "policy") -> ScoreResult:
        """Evaluate the response tokens in case ``trainer_score``.

        Raises InputError without a reference model, and for a sample that cannot be evaluated.
        """
        if model not in ("policy", "reference"):
            raise InputError(f"scores of model {model!r} were asked for: policy and reference exist")
        chosen = self._model if model == "policy" else self._reference
        if chosen is None:
            raise InputError("scores of the reference model were asked for, and the trainer has none")
        check_vocabulary(samples, chosen.definition.config.vocab_size)
        self._backend.probe()
        case = "trainer_score"
        results: list[ScoredSample] = []
        with count_forward(chosen, case) as count:
            for batch in micro_batches(len(samples), self.config.micro_batch_samples):
                results += evaluate(chosen, samples[batch.start : batch.stop], self.config.temperature, case)
        digest = self.manifest_digest() if model == "policy" else chosen.weights.manifest_digest()
        return ScoreResult(tuple(results), case, count.tokens, digest)

    def trace(self, sample: TrainSample, temperature: float) -> list[Boundary]:
        """Every region boundary of :meth:`score`'s forward, to find where it parts from the rollout's."""
        return trace_sample(self._model, sample, temperature, "trainer_score")

    def redraw(self, sample: TrainSample, params: SamplingParams, seed: int) -> NDArray[np.int64]:
        """Draw the response tokens of a sample again, int64 [T], from a forward of this trainer's own.

        The sampler is the engine's, the logits are not: each token is drawn after the sample's own tokens before it.
        """
        check_vocabulary([sample], self._model.definition.config.vocab_size)
        return redrawn(self._model, sample, params, seed)

    def train(self, step: int, samples: Sequence[TrainSample]) -> TrainResult:
        """All updates of one step.

        ``first_forward`` holds the samples of the first update: the others' training forward sees updated weights.

        Raises:
            InputError: a sample lacks what the loss needs, or the updates cannot be made of whole groups.
            NumericsError: a log-probability, coefficient, loss or gradient is not finite, or a recomputation
                differs. Updates before the failing one have been done; resume from a checkpoint.
        """
        if step != self._steps:
            raise InputError(
                f"step {step} was asked for, but the trainer has done {self._steps}: steps are consecutive"
            )
        self._backend.probe()
        check_vocabulary(samples, self._model.definition.config.vocab_size)
        for sample in samples:
            self._check(sample)
        weights = step_weights([sample.loss_mask for sample in samples], self.config.loss.normalise)
        before = self.manifest_digest()
        self._optimizer.check_master(self._tensors)
        outcomes: list[_UpdateOutcome] = []
        first_tokens = 0
        gradients: Mapping[str, Any] = {}
        for update in update_batches(samples, self.config.updates_per_step):
            with count_forward(self._model, "trainer_forward") as count:
                outcome, gradients = self._update(update, samples, weights)
            first_tokens = first_tokens or count.tokens
            outcomes.append(outcome)
        self._steps += 1
        self._backend.probe()
        return self._result(outcomes, first_tokens, before, gradients)

    def _update(
        self, update: range, samples: Sequence[TrainSample], weights: Sequence[np.float32]
    ) -> tuple[_UpdateOutcome, Mapping[str, Any]]:
        gradients = self._backend.gradients(self._gradient_shape)
        losses: list[TokenLosses] = []
        scores: list[ScoredSample] = []
        for block in leaf_blocks(update, self._gradient_shape.leaves):
            for batch in micro_batches(len(block), self.config.micro_batch_samples):
                indices = block[batch.start : batch.stop]
                part = samples[indices.start : indices.stop]
                flat = flatten(part)
                tape = self._model.forward(
                    token_batch(flat),
                    flat.rows,
                    flat.targets,
                    self.config.temperature,
                    checkpointing=self.config.activation_checkpointing,
                )
                token_loss = self._losses(part, tape.statistics.logprob, weights[indices.start : indices.stop])
                self._model.backward(tape, token_loss.coefficient, gradients)
                losses.append(token_loss)
                scores += scored(part, flat, tape.statistics)
            gradients.end_leaf()
        finished = gradients.finish()
        norm, learning_rate, self._tensors = self._optimizer.update(finished)
        self._model.weights.update(self._tensors)
        return _UpdateOutcome(losses, scores, norm, learning_rate), finished

    def _losses(self, part: Sequence[TrainSample], new: np.ndarray, weights: Sequence[np.float32]) -> TokenLosses:
        loss = self.config.loss
        lengths = [len(sample.token_ids) for sample in part]
        given = (
            np.ascontiguousarray(new),
            np.concatenate([sample.loss_mask for sample in part]),
            np.repeat(np.array([sample.advantage for sample in part], dtype=np.float32), lengths),
            np.repeat(np.array(weights, dtype=np.float32), lengths),
            _joined(part, "old_logprobs") if loss.needs_old else None,
            _joined(part, "reference_logprobs") if loss.needs_reference else None,
        )
        result = token_losses(loss, *given)
        if self._first_use is not None and self._first_use.losses_due(len(new)):
            self._first_use.losses(loss.constants(), _loss_inputs(*given), result.loss, result.coefficient)
        self._model.evidence.ran("loss", "optimizer_step", self._backend.implementations["loss"], len(new))
        for name, values in (("log-probability", new), ("loss", result.loss), ("coefficient", result.coefficient)):
            at = first_nonfinite(values)
            if at is not None:
                sample, token = _locate(part, at)
                raise NumericsError(
                    f"the {name} of sample {sample.sample_id}, response token {token} (position "
                    f"{len(sample.prompt_token_ids) + token}) is {values[at]} in the training forward"
                )
        return result

    def _check(self, sample: TrainSample) -> None:
        check_sample(sample)
        loss = self.config.loss
        if loss.needs_old and sample.old_logprobs is None:
            raise InputError(f"sample {sample.sample_id} has no old log-probabilities; loss {loss.policy} needs them")
        if loss.needs_reference and sample.reference_logprobs is None:
            raise InputError(f"sample {sample.sample_id} has no reference log-probabilities; kl: {loss.kl} needs them")
        if not math.isfinite(sample.advantage):
            raise InputError(f"the advantage of sample {sample.sample_id} is {sample.advantage}: it has to be finite")

    def _result(
        self, outcomes: list[_UpdateOutcome], first_tokens: int, before: str, gradients: Mapping[str, Any]
    ) -> TrainResult:
        parts = [part for outcome in outcomes for part in outcome.losses]
        loss = self.config.loss
        has_ratio = loss.needs_old
        total = summarise(parts, has_ratio=has_ratio, has_reference=loss.needs_reference)
        per_update = [summarise(o.losses, has_ratio=has_ratio, has_reference=False) for o in outcomes]
        norms = [outcome.grad_norm for outcome in outcomes]
        return TrainResult(
            loss=total.loss,
            grad_norm=ordered_mean(norms),
            learning_rate=outcomes[-1].learning_rate,
            clip_fraction=total.clip_fraction,
            ratio_min=total.ratio_min,
            ratio_max=total.ratio_max,
            updates=len(outcomes),
            first_forward=ScoreResult(tuple(outcomes[0].scores), "trainer_forward", first_tokens, before),
            gradient_digest=self._backend.gradient_digest(gradients),
            facts={
                "trained_tokens": total.trained_tokens,
                "reference_kl": _measured(total.reference_kl),
                "update_losses": [part.loss for part in per_update],
                "update_grad_norms": norms,
                "first_update_ratio_min": _measured(per_update[0].ratio_min),
                "first_update_ratio_max": _measured(per_update[0].ratio_max),
                "total_updates": self.updates,
            },
        )

    def save(self, folder: Path) -> dict[str, str]:
        """Write weights, master, moments and counters; returns file name -> SHA-256."""
        return state.save(
            folder, self._tensors, self._optimizer, steps=self._steps, identities=self._identities, dtype=self._dtype
        )

    def load(self, folder: Path) -> None:
        """Inverse of :meth:`save`: everything is verified before anything is taken. Raises InputError."""
        loaded = state.load(folder, self._tensors, self._optimizer, identities=self._identities, dtype=self._dtype)
        self._steps = loaded.steps
        self._tensors = self._backend.copies(loaded.tensors)
        self._model.weights.update(self._tensors)

    def evidence(self) -> dict[str, Any]:
        """What ran, and the degrees that it ran at."""
        self._model.evidence.facts.update(degrees=Topology().as_json())  # one process
        return self._model.evidence.as_json()

    def close(self) -> None:
        """Nothing is held that outlives the object; the workers belong to their maker."""


def _measured(value: float) -> float | None:
    """None instead of NaN: facts are plain JSON."""
    return None if math.isnan(value) else value


def leaf_blocks(update: range, leaves: int) -> list[range]:
    """The samples of an update in ``leaves`` consecutive blocks by index; block i starts at ``n * i // leaves``."""
    bounds = [len(update) * i // leaves for i in range(leaves + 1)]
    return [update[bounds[i] : bounds[i + 1]] for i in range(leaves)]


def _loss_inputs(new: Any, trained: Any, advantage: Any, weight: Any, old: Any, reference: Any) -> LossInputs:
    """Arguments of :func:`vime.train.losses.token_losses` as the contract's interpreter takes them."""
    values = (new, new if old is None else old, new if reference is None else reference, advantage, weight)
    return LossInputs(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (*values, trained)))


def _joined(part: Sequence[TrainSample], name: Literal["old_logprobs", "reference_logprobs"]) -> np.ndarray:
    return np.concatenate([getattr(sample, name) for sample in part])


def _locate(part: Sequence[TrainSample], index: int) -> tuple[TrainSample, int]:
    for sample in part:
        if index < len(sample.token_ids):
            return sample, index
        index -= len(sample.token_ids)
    raise InputError(f"token {index} lies behind the last of {len(part)} samples")
