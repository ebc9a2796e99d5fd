"""Drives a run: setting up or resuming, the graph of stages for every step, evaluation, checkpoints, the end."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlkernel.contract.canonical import digest
from rlkernel.errors import RlkernelError
from rlkernel.models.saving import write_description
from vime.errors import InputError, Interrupted, InvariantViolation, VimeError
from vime.mismatch.report import build_report
from vime.pipeline.graph import Graph, Stage
from vime.pipeline.loading import resolved_yaml
from vime.pipeline.prepare import Prepared
from vime.pipeline.stages import step_specs
from vime.report.summary import Status
from vime.runtime.assembly import Sides, SidesFactory, assemble
from vime.runtime.checks import ClaimChecks, Sentinels
from vime.runtime.observer import Observer, RunOutcome, Silent
from vime.runtime.publication import Publisher
from vime.runtime.resuming import (
    pipeline_digest,
    refuse_other_data,
    refuse_other_identities,
    refuse_other_pipeline,
    say_what_was_found,
    settings_as_json,
)
from vime.runtime.stages import StepStages
from vime.runtime.views import gathered_evidence, rewrite_report, write_contract, write_report
from vime.store.files import file_sha256
from vime.store.run_directory import RunDirectory
from vime.store.steps import evaluation_report, step_report
from vime.timeline.event import encode_value
from vime.timeline.events import (
    ContractFixed,
    Evaluated,
    PromptDrawn,
    RunFinished,
    RunInterrupted,
    RunStarted,
    StepFinished,
)
from vime.train.ordered import ordered_mean
from vime.types import Prompt


def run(
    prepared: Prepared,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    sides: SidesFactory = assemble,
) -> RunOutcome:
    """Run a checked pipeline from its start, or resume it.

    Args:
        prepared: the pipeline with everything that the checks loaded.
        resume: take up the run in its directory; a finished run is reported again.
        observer: watches; cannot change a bit.
        sides: builds trainer and engine (tests plant faults here).

    Raises:
        InputError: the directory cannot be used, or a file does not fit.
        InvariantViolation: bits differ, or an invariant of the timeline is broken.
        Interrupted: the run stopped and can be resumed.
    """
    observer = observer or Silent()
    path, keep = Path(prepared.pipeline.run_directory), prepared.pipeline.checkpoint.keep
    if resume:
        directory = RunDirectory.open_for_resume(path, keep)
    else:
        directory = RunDirectory.create(path, resolved_yaml(prepared.pipeline), keep)
    with directory:
        try:
            return _Run(prepared, directory, observer).drive(sides)
        except BaseException:
            if not resume:
                with suppress(VimeError):  # what stopped the run is what the user has to know
                    directory.discard_unbegun()
            raise


class _Run:
    """One call of :func:`run`, with its directory open."""

    def __init__(self, prepared: Prepared, directory: RunDirectory, observer: Observer) -> None:
        self.prepared, self.pipeline = prepared, prepared.pipeline
        self.directory, self.timeline, self.observer = directory, directory.timeline, observer
        self.started = time.perf_counter()
        self.reports: list[Mapping[str, Any]] = []
        self.evaluations: list[Mapping[str, Any]] = []
        self.recalled = self.repeated = 0
        self.step, self.step_started = -1, 0.0
        self.sentinels: Sentinels
        self.times: dict[str, float] = {}

    def drive(self, factory: SidesFactory) -> RunOutcome:
        """Set up, do all steps, close."""
        resumption = self.directory.resumption
        refuse_other_pipeline(self.directory.path, resumption, self.pipeline)
        say_what_was_found(self.directory.path, resumption, self.directory.found)
        self._recall()
        if resumption.finished:
            rewrite_report(self.directory, self.prepared, self.reports, self.evaluations)
            return self._outcome()
        refuse_other_data(self.directory.path, resumption, self._data_digest())
        sides = factory(self.prepared, self.directory.path)
        try:
            self._work(sides)
        except (Interrupted, KeyboardInterrupt) as error:
            self._note_interruption(sides, str(error) or "interrupted")
            raise
        except BrokenPipeError:
            self._note_interruption(sides, "nobody reads the output any more")
            raise
        except (VimeError, RlkernelError) as error:
            self._note_interruption(sides, str(error))
            raise
        finally:
            sides.close()
        outcome = self._outcome()
        self.observer.finished(outcome)
        return outcome

    def _recall(self) -> None:
        """Reports and evaluations up to the point from where the run goes on."""
        state = self.timeline.state
        finished = [step.finished for step in state.steps.values() if step.finished is not None]
        self.reports = [step_report(event) for event in finished]
        self.recalled = len(self.reports)
        self.evaluations = [evaluation_report(event) for event in state.evaluations]

    def _work(self, sides: Sides) -> None:
        exact = self.pipeline.numerics.rollout == self.pipeline.numerics.trainer == "exact"
        identities = sides.check_identities()
        refuse_other_identities(self.directory.path, self.directory.resumption, identities, sides.engine.engine_id)
        checkpoint = self.directory.resume_checkpoint()
        if checkpoint is None:
            self._start(sides, exact, identities)
        self.directory.announce_pipeline()
        claims = ClaimChecks(sides)
        claims.start()
        self.sentinels = Sentinels(sides, checkpointing=self.pipeline.stages.train.activation_checkpointing)
        publisher = Publisher(sides, self.timeline, claims)
        stages = StepStages(self.prepared, sides, self.directory, publisher, self.observer)
        write_contract(self.directory, self.prepared, sides)
        first = self.timeline.state.next_step
        self.observer.started(self.directory.path, first, self.pipeline.steps)
        if checkpoint is None:
            publisher.publish()
            self._evaluate(stages, publisher, 0)
        else:
            sides.trainer.load(checkpoint.folder)
            publisher.catch_up()
        graph = self._graph(stages)
        for step in range(first, self.pipeline.steps):
            self._step(step, graph, stages, publisher)
            self._after_step(step, stages, publisher, sides)
        self.sentinels.begin()  # of the last evaluation
        claims.finish()
        evidence = gathered_evidence(sides)
        self.directory.write_evidence(evidence)  # announced: nothing can be after the run's end
        self.timeline.append(RunFinished(weights_digest=publisher.digest))
        self._write_report(sides, evidence, "finished", "")

    def _start(self, sides: Sides, exact: bool, identities: Mapping[str, Mapping[str, str]]) -> None:
        pipeline, engine = self.pipeline, sides.engine
        self.timeline.append(
            RunStarted(
                run_seed=pipeline.seed,
                pipeline_digest=pipeline_digest(pipeline),
                steps=pipeline.steps,
                max_staleness=pipeline.max_staleness,
                data_digest=self._data_digest(),
                engines=(engine.engine_id,),
                resolved_digest=digest(encode_value(pipeline.model_dump(mode="json"))),
                placement={"placement": pipeline.placement, "transport": sides.transport.name},
                observed={"pipeline": settings_as_json(pipeline), "working_directory": os.getcwd()},
            )
        )
        named = ("semantic", "numerical_policy")
        self.timeline.append(
            ContractFixed(
                trainer={name: identities["trainer"][name] for name in named},
                rollout={name: identities[engine.engine_id][name] for name in named},
                exact=exact,
                sides=identities,
            )
        )

    def _data_digest(self) -> str:
        sets = {"train": self.prepared.train_prompts, "eval": self.prepared.eval_prompts}
        return digest({name: prompts.digest() for name, prompts in sets.items() if prompts is not None})

    def _graph(self, stages: StepStages) -> Graph:
        bound = stages.bound()
        specs = step_specs(self.pipeline)
        declared = tuple(spec.bind(bound[spec.name]) for spec in specs)
        return Graph(declared, {name: kind for name, kind in self.prepared.graph.initial.items()})

    def _draw(self, step: int) -> list[Prompt]:
        count = self.pipeline.stages.rollout.prompts_per_step
        prompts = self.prepared.train_prompts.take(self.timeline.state.cursor["train"], count)
        for prompt in prompts:
            row = self.prepared.train_prompts.row_number(prompt.prompt_index)
            self.timeline.append(PromptDrawn.of(prompt, row))
        return list(prompts)

    def _step(self, step: int, graph: Graph, stages: StepStages, publisher: Publisher) -> None:
        self.observer.step_started(step)
        self.step = step
        self._in_place("start", self.sentinels.begin)
        self.step_started, self.times = time.perf_counter(), {}
        version = publisher.version
        stages.begin(step)
        graph.execute({"prompts": self._draw(step)}, self._timed)
        self.times["total"] = time.perf_counter() - self.step_started
        record = stages.record
        assert record.comparison is not None
        times = {name: value for name, value in self.times.items() if name not in ("filter", "advantage")}
        report = build_report(
            step=step,
            weight_version=version,
            samples=record.samples,
            comparison=record.comparison,
            advantages=record.advantages,
            trained=record.trained,
            time_s=times,
            peak_memory_bytes=peak_memory_bytes(),
            dropped_samples=record.dropped,
        ).as_json()
        self.reports.append(step_report(self.timeline.append(StepFinished.of(report))))
        self.repeated += self.timeline.repeated
        self.observer.step_finished({**self.reports[-1], "repeated": self.timeline.repeated})

    def _timed(self, stage: Stage, call: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        if self.observer.stop_requested():
            raise Interrupted(f"stopped on request before stage {stage.name}")
        self.observer.stage(stage.name)
        begun = time.perf_counter()
        try:
            results = call()
            self._in_place(stage.name, lambda: self.sentinels.after(stage.name, results))
            return results
        finally:
            self.times[stage.name] = time.perf_counter() - begun

    def _in_place(self, place: str, check: Callable[[], None]) -> None:
        """Run a check of the step; what it finds says where."""
        try:
            check()
        except InvariantViolation as error:
            raise InvariantViolation(f"step {self.step}, {place}: {error}") from error

    def _after_step(self, step: int, stages: StepStages, publisher: Publisher, sides: Sides) -> None:
        settings, last = self.pipeline.stages.evaluate, step + 1 == self.pipeline.steps
        if last or (settings.every and (step + 1) % settings.every == 0):
            self._evaluate(stages, publisher, step + 1)
        every = self.pipeline.checkpoint.every
        if every and (last or (step + 1) % every == 0):
            self.observer.stage("checkpoint")
            self.directory.write_checkpoint(step, lambda folder: self._fill_checkpoint(folder, sides))
            evidence = gathered_evidence(sides)
            self.directory.write_evidence(evidence)
            self._write_report(sides, evidence, "running", "")

    def _fill_checkpoint(self, folder: Path, sides: Sides) -> dict[str, str]:
        """The trainer's state, and what makes the folder a model that transformers loads; file name -> SHA-256."""
        files = dict(sides.trainer.save(folder))
        write_description(folder, self.prepared.config, self.pipeline.contract.dtype, self.prepared.tokenizer)
        files.update({path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name not in files})
        return files

    def _evaluate(self, stages: StepStages, publisher: Publisher, done: int) -> None:
        settings = self.pipeline.stages.evaluate
        if not settings.prompts or self.prepared.eval_prompts is None:
            return
        self.observer.stage("evaluate")
        prompts = self.prepared.eval_prompts.take(0, settings.prompts)
        for prompt in prompts:
            row = self.prepared.eval_prompts.row_number(prompt.prompt_index)
            self.timeline.append(PromptDrawn.of(prompt, row))
        samples = stages.generate_held_out(prompts, settings.samples_per_prompt)
        proven = stages.prove_held_out(samples, done)
        rewards = stages.give_rewards(prompts, samples, f"evaluation after {done} steps")
        values = [rewards[sample.sample_id] for sample in samples if sample.sample_id in rewards]
        event = self.timeline.append(
            Evaluated(
                step=done,
                version=publisher.version,
                num_samples=len(values),
                reward_mean=ordered_mean(values) if values else None,
                metrics={
                    "response_length_mean": ordered_mean([float(len(s.token_ids)) for s in samples]),
                    "dropped_samples": len(samples) - len(values),
                    **proven,
                },
            )
        )
        self.evaluations.append(evaluation_report(event))
        self.observer.evaluated({**self.evaluations[-1], "repeated": self.timeline.repeated})

    # what is written beside the log

    def _write_report(self, sides: Sides, evidence: Mapping[str, Any], status: Status, reason: str) -> None:
        write_report(self.directory, self.prepared, sides, evidence, self.reports, self.evaluations, status, reason)

    def _note_interruption(self, sides: Sides, reason: str) -> None:
        """Say in the log and in the views why the run stops; a disk that refuses must not hide the reason."""
        evidence: Mapping[str, Any] = {}
        try:
            evidence = gathered_evidence(sides, stopped=True)
            if self.timeline.state.run is not None:
                self.directory.write_evidence(evidence)
        except (VimeError, RlkernelError, OSError) as error:
            print(f"vime: the evidence in {self.directory.path} is not up to date: {error}", file=sys.stderr)
        try:
            self.timeline.append(RunInterrupted(reason=reason))
        except VimeError as error:
            print(f"vime: the interruption could not be noted in the log: {error}", file=sys.stderr)
        try:
            self._write_report(sides, evidence, "stopped", reason)
        except (VimeError, OSError) as error:
            print(f"vime: the report in {self.directory.path} is not up to date: {error}", file=sys.stderr)

    def _outcome(self) -> RunOutcome:
        counts = {
            what: sum(report[name] or 0 for report in self.reports)
            for what, name in (
                ("log-probabilities", "mismatch_count"),
                ("whole distributions", "distribution_mismatch_count"),
            )
        }
        differing = any(counts.values())
        latest = self.timeline.state.latest_version
        return RunOutcome(
            status="mismatch" if differing else "completed",
            run_directory=self.directory.path,
            steps=len(self.reports),
            reports=tuple(self.reports),
            evaluations=tuple(self.evaluations),
            seconds=time.perf_counter() - self.started,
            manifest_digest="" if latest is None else latest.digest,
            message=(
                " and ".join(f"{count:,} {what}" for what, count in counts.items())
                + f" of {sum(report['compared_tokens'] for report in self.reports):,} compared tokens differ between "
                "rollout and trainer"
                if differing
                else ""
            ),
            recalled=self.recalled,
            repeated=self.repeated,
            extra={"run_digest": self.timeline.run_digest()},
        )


def peak_memory_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


__all__ = ["InputError", "InvariantViolation", "pipeline_digest", "run"]
