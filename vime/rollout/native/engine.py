"""The embedded rollout engine: continuous batching over a paged KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.claims import Topology
from rlkernel.contract.identity import Identities, TensorEntry
from rlkernel.verify.evidence import Evidence
from vime.errors import InputError, InvariantViolation
from vime.mismatch.localise import Boundary, trace_sample
from vime.rollout.interface import CommittedVersion
from vime.rollout.native.batch import StepInputs, build_inputs
from vime.rollout.native.blocks import BlockManager
from vime.rollout.native.checks import check_request
from vime.rollout.native.config import EngineConfig
from vime.rollout.native.model import EngineModel, KVPages, KVShape, PagedKV
from vime.rollout.native.sampling import sample_tokens
from vime.rollout.native.scheduler import Scheduler, StepPlan
from vime.rollout.native.scoring import score_sequence
from vime.rollout.native.sequence import SequenceState
from vime.rollout.native.stops import Detokenize, StopStrings
from vime.rollout.native.weights import WeightsFactory, WeightSlots
from vime.train.batching import check_sample, check_vocabulary
from vime.train.interface import ScoredSample, TrainSample
from vime.types import FinishReason, GeneratedSample, RolloutRequest, SampleId

ModelFactory = Callable[[Any], EngineModel]
KVFactory = Callable[[KVShape, int, int], KVPages]
COUNTS = (
    "steps_prefill",
    "steps_decode",
    "samples_finished",
    "samples_aborted",
    "tokens_generated",
    "tokens_computed",
    "commits",
    "blocks_invalidated",
    "sequences_recomputed_in_flight",
    "sequences_continued_on_old_kv",
)


@dataclass(frozen=True)
class EngineProgress:
    """Where the engine stands after a step."""

    steps: int
    running: int
    waiting: int
    finished: int
    generated_tokens: int
    blocks_in_use: int


class NativeEngine:
    """Generates samples with the weights that were committed last.

    Args:
        config: how to schedule; never changes a token.
        identities: of the model and numerical policy that ``model_factory`` builds.
        kv_shape: dimensions of the KV cache.
        vocab_size: number of token ids.
        weights_factory: logical tensors -> weights as the model computes with them (a copy).
        model_factory: those weights -> a model; called once a commit, so it has to be cheap.
        detokenize: response token ids -> text; without it samples have no text and stop strings are refused.
        evidence: counters that the model shares.
        progress: called after every step; it may call :meth:`abort`.
        clock: seconds since the epoch, provenance of tokens only.
        kv_factory: dimensions, number of blocks and block size -> pages in the layout of the model's kernels; the
            CPU's without it.
        probe: called before and after generation and before scores; raises if the threads no longer compute as they
            have to (flushed subnormals).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        identities: Identities,
        kv_shape: KVShape,
        vocab_size: int,
        weights_factory: WeightsFactory,
        model_factory: ModelFactory,
        detokenize: Detokenize | None = None,
        evidence: Evidence | None = None,
        progress: Callable[[EngineProgress], None] | None = None,
        clock: Callable[[], float] = time.time,
        kv_factory: KVFactory = PagedKV,
        probe: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks)
        self.scheduler = Scheduler(config, self.blocks)
        self.progress = progress
        self._identities = identities
        self._vocab_size = vocab_size
        self._kv = kv_factory(kv_shape, config.num_blocks, config.block_size)
        self._weights = WeightSlots(config.engine_id, weights_factory)
        self._model_factory = model_factory
        self._model: EngineModel | None = None
        self._detokenize = detokenize
        self._evidence = evidence if evidence is not None else Evidence(config.engine_id)
        self._clock = clock
        self._probe = probe if probe is not None else _no_probe
        self._live: dict[SampleId, SequenceState] = {}
        self._aborted: list[GeneratedSample] = []  # until the next step returns them
        self._done: dict[SampleId, GeneratedSample] = {}  # finished in a step that another iterator asked for
        self._counts = dict.fromkeys(COUNTS, 0)
        self._closed = False

    @property
    def engine_id(self) -> str:
        """Name that is written beside every sample."""
        return self.config.engine_id

    def identities(self) -> Identities:
        """Digests that the trainer's must equal."""
        return self._identities

    # weights

    def stage_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        """Copy weights beside the served ones; returns the manifest digest recomputed from the copy.

        Raises InvariantViolation if other weights are staged, or the version does not follow the served one.
        """
        self._refuse_closed()
        return self._weights.stage(version, tensors)

    def staged_manifest(self) -> Sequence[TensorEntry]:
        """Of the weights as they were staged. Raises InvariantViolation if there are none."""
        return self._weights.staged_manifest()

    def commit_weights(self, version: int, digest: str) -> CommittedVersion:
        """Serve the staged weights and forget every cached block of the old ones.

        Raises:
            InvariantViolation: version or digest are not the staged ones, or unfinished samples exist and the
                engine's policy refuses in-flight updates. The old version serves on and the new one stays staged.
        """
        self._refuse_closed()
        staged = self._weights.check_commit(version, digest)
        begun = [s for s in self._live.values() if s.row >= 0 or s.generated]
        if begun and self.config.in_flight_updates == "refuse":
            raise InvariantViolation(
                f"engine {self.engine_id}: version {version} is to be committed while {len(begun)} samples are in "
                f"flight (the first is {begun[0].request.sample_id}) and in_flight_updates is 'refuse'"
            )
        model = self._model_factory(staged.weights)
        if self.config.in_flight_updates == "recompute":
            # the latest first, so that they wait in order of admission
            for sequence in reversed(list(self.scheduler.running)):
                self.scheduler.preempt(sequence)
                self._counts["sequences_recomputed_in_flight"] += 1
        self._counts["sequences_continued_on_old_kv"] += len(self.scheduler.running)
        self._counts["blocks_invalidated"] += self.blocks.invalidate()
        self._counts["commits"] += 1
        self._weights.commit(staged)
        self._model = model
        return CommittedVersion(version, staged.digest)

    def rollback_weights(self) -> None:
        """Forget staged weights; the old version serves on."""
        self._weights.rollback()

    def committed(self) -> CommittedVersion | None:
        """What is served, the digest recomputed from the bytes as they are now."""
        return self._weights.committed()

    # generation

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[GeneratedSample]:
        """Generate all requests; yields each sample when it finishes (within a step: in order of admission).

        Everything is checked here, before the first sample is asked for. Closing the iterator early drops what is
        unfinished. Other calls may be in progress: all share the steps.

        Raises:
            InputError: a request that cannot be generated, named.
            InvariantViolation: no version is committed.
        """
        self._refuse_closed()
        _ = self._weights.served
        self._check(requests)
        return self._generate(list(requests))

    def _generate(self, requests: list[RolloutRequest]) -> Iterator[GeneratedSample]:
        self._probe()
        self.submit(requests)
        owned = {request.sample_id: None for request in requests}
        try:
            while owned:
                for sample_id in [s for s in self._done if s in owned]:
                    del owned[sample_id]
                    yield self._done.pop(sample_id)
                if owned:
                    self._done.update((sample.sample_id, sample) for sample in self.step())
            self._probe()
        finally:
            self._drop(owned)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests for :meth:`step`. Raises InputError, and queues none, if one cannot be generated."""
        self._refuse_closed()
        self._check(requests)
        for request in requests:
            params = request.params
            stops = None
            if params.stop_strings and self._detokenize is not None:
                stops = StopStrings(params.stop_strings, self._detokenize)
            sequence = SequenceState(request, self.config.max_position, stops)
            self._live[request.sample_id] = sequence
            self.scheduler.submit(sequence)

    def _check(self, requests: Sequence[RolloutRequest]) -> None:
        seen: set[SampleId] = set()
        pending = {sample.sample_id for sample in self._aborted}
        for request in requests:
            sample = request.sample_id
            if sample in seen or sample in self._live or sample in self._done or sample in pending:
                raise InputError(f"engine {self.engine_id}: sample {sample} is requested twice; a sample is made once")
            seen.add(sample)
            check_request(request, self.config, self._vocab_size, self._detokenize is not None)

    @property
    def unfinished(self) -> int:
        """Queued and running samples."""
        return len(self._live)

    def step(self) -> list[GeneratedSample]:
        """One forward pass; returns the samples that it finished, and before them those aborted since the last step.

        If it raises, every unfinished sample and all cached KV are dropped: nothing half-computed is served later.

        Raises:
            InvariantViolation: no version is committed, a block of another version would be read, or no progress.
        """
        self._refuse_closed()
        served = self._weights.served
        aborted, self._aborted = self._aborted, []
        if not self._live:
            return aborted
        completed = False
        try:
            finished = self._step(served.version)
            completed = True
        finally:
            if not completed:
                self._drop(list(self._live))
                self.blocks.invalidate()
        if self.progress is not None:
            self.progress(self._progress())
        return aborted + finished

    def _step(self, version: int) -> list[GeneratedSample]:
        model, rows = self._model, self.scheduler.rows
        assert model is not None
        plan = self.scheduler.plan(version)
        if not plan.sequences:
            raise InvariantViolation(
                f"engine {self.engine_id}: no progress with {len(self.scheduler.waiting)} waiting samples, "
                f"{len(self.scheduler.running)} running, {self.blocks.available} KV blocks available"
            )
        inputs = build_inputs(plan, rows, self._kv)
        hidden = model.hidden(inputs.batch, inputs.state, inputs.case)
        rows.computed[plan.rows] += plan.takes
        self._counts["steps_decode" if inputs.case == "rollout_decode" else "steps_prefill"] += 1
        self._counts["tokens_computed"] += len(inputs.batch.tokens)
        if not len(inputs.sampled):
            return []
        records = sample_tokens(
            model,
            hidden,
            plan,
            inputs,
            rows,
            seed=self.config.seed,
            version=version,
            sampled_at=self._clock(),
        )
        return self._append(plan, inputs, records)

    def _append(self, plan: StepPlan, inputs: StepInputs, records: NDArray[np.void]) -> list[GeneratedSample]:
        rows, chosen, tokens = self.scheduler.rows, plan.rows[inputs.sampled], records["token"]
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise InvariantViolation(
                f"engine {self.engine_id}: the model sampled token ids from {int(tokens.min())} to "
                f"{int(tokens.max())}; the vocabulary has {self._vocab_size}"
            )
        may_end = rows.keep(chosen, records)
        self._counts["tokens_generated"] += len(records)
        ended: list[tuple[SequenceState, FinishReason]] = []
        for i in may_end.tolist():
            sequence = plan.sequences[inputs.sampled[i]]
            reason = sequence.end(int(tokens[i]), int(rows.total[sequence.row]))
            if reason is not None:
                ended.append((sequence, reason))
        if not ended:
            return []
        self.scheduler.remove([sequence for sequence, _ in ended])
        self._counts["samples_finished"] += len(ended)
        return [self._finish(sequence, reason) for sequence, reason in ended]

    def _finish(self, sequence: SequenceState, reason: FinishReason) -> GeneratedSample:
        del self._live[sequence.request.sample_id]
        tokens = sequence.tokens[sequence.prompt_length : sequence.length].tolist()
        text = self._detokenize(tokens) if self._detokenize is not None else ""
        return sequence.sample(reason, self.engine_id, text)

    def score(self, sample: TrainSample, temperature: float) -> ScoredSample:
        """Evaluate a given sequence with the served weights, by a forward of its own. Raises as :meth:`generate`."""
        self._refuse_closed()
        _ = self._weights.served
        check_sample(sample)
        check_vocabulary([sample], self._vocab_size)
        self._probe()
        return score_sequence(self._model, sample, temperature)

    def trace(self, sample: TrainSample, temperature: float) -> list[Boundary]:
        """Every region boundary of :meth:`score`'s forward, to find where it parts from the trainer's."""
        self._refuse_closed()
        _ = self._weights.served
        return trace_sample(self._model, sample, temperature, "rollout_prefill")

    def abort(self, sample_id: SampleId) -> None:
        """End a sample now, with the tokens it has; it is yielded with finish reason ``aborted``.

        Raises InputError if the sample is not queued or running.
        """
        sequence = self._live.get(sample_id)
        if sequence is None:
            raise InputError(f"engine {self.engine_id}: sample {sample_id} cannot be aborted, it is not in progress")
        self.scheduler.remove([sequence])
        self._counts["samples_aborted"] += 1
        self._aborted.append(self._finish(sequence, "aborted"))

    def _drop(self, samples: Sequence[SampleId] | Mapping[SampleId, None]) -> None:
        self.scheduler.remove([self._live.pop(s) for s in samples if s in self._live])
        for sample_id in samples:
            self._done.pop(sample_id, None)
        self._aborted = [sample for sample in self._aborted if sample.sample_id not in samples]

    # reports

    def _progress(self) -> EngineProgress:
        return EngineProgress(
            steps=self._counts["steps_prefill"] + self._counts["steps_decode"],
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            finished=self._counts["samples_finished"],
            generated_tokens=self._counts["tokens_generated"],
            blocks_in_use=self.blocks.in_use,
        )

    def evidence(self) -> dict[str, Any]:
        """What ran: calls per region and case, and the facts of scheduling and caches."""
        scheduler, blocks = self.scheduler, self.blocks
        self._evidence.facts.update(
            self._counts,
            paged_kv=True,
            block_size=self.config.block_size,
            blocks_total=blocks.num_blocks,
            blocks_peak=blocks.peak_in_use,
            blocks_cached=blocks.cached,
            block_evictions=blocks.evictions,
            preemptions=scheduler.preemptions,
            prefix_caching=self.config.prefix_caching,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_lookup_tokens=scheduler.prefix_lookup_tokens,
            in_flight_updates=self.config.in_flight_updates,
            cached_versions=blocks.cached_versions(),
            kv_versions=blocks.versions_in_use(),
            degrees=Topology().as_json(),  # one process
        )
        return self._evidence.as_json()

    def close(self) -> None:
        """Drop everything; later calls are refused."""
        self._drop(list(self._live))
        self._done.clear()
        self._aborted.clear()
        self._weights.rollback()
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InvariantViolation(f"engine {self.engine_id} is closed")


def _no_probe() -> None:
    """An engine whose maker gave nothing to probe."""
