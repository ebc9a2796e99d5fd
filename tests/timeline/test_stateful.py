"""Whatever crashes, cuts and scheduling a run goes through, its log folds to the state of an undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.timeline.building import compared, generated, reported, started, synced, trained
from vime.errors import InvariantViolation
from vime.timeline.event import Event
from vime.timeline.events import (
    ArraysWritten,
    BatchAssigned,
    CheckpointWritten,
    Decision,
    PromptDrawn,
    RewardGiven,
    RunFinished,
    RunInterrupted,
    SampleDropped,
)
from vime.timeline.invariants import check_all
from vime.timeline.log import read_log
from vime.timeline.manager import Timeline
from vime.timeline.order import run_digest
from vime.types import SampleId

STEPS = 3


def segments(seed: int) -> list[list[Event]]:
    """What the run computes: free events in any order of samples, each list ended by an ordered event."""
    rng = random.Random(seed)
    first = [*started(steps=STEPS)]
    out: list[list[Event]] = [[first[0]], [first[1]], [synced(0, "w0")[0]]]
    pending: list[list[Event]] = [synced(0, "w0")[1:]]
    for step in range(STEPS):
        ids = [SampleId("train", step, k) for k in range(3)]
        last = synced(step, f"w{step}")[1:] if step else pending[0]
        chains: list[list[Event]] = [[*last, PromptDrawn(namespace="train", prompt_index=step, prompt_digest="x")]]
        tokens = 0
        for sample_id in ids[:2]:
            count = rng.randint(1, 4)
            tokens += count
            reward = RewardGiven(sample_id=sample_id, reward=rng.random(), source="t")
            chains.append([*generated(sample_id, step, count), reward])
        chains.append([*generated(ids[2], step), SampleDropped(sample_id=ids[2], reason="late")])
        chains.append([Decision(kind="clock", key=str(step), value=0.5)])
        out.append(
            [*_interleaved(chains, rng), BatchAssigned(step=step, policy_version=step, sample_ids=tuple(ids[:2]))]
        )
        counts = {"num_tokens": tokens, "compared_tokens": tokens}
        out.append([compared(step=step, forward_tokens=20, manifest_digest=f"w{step}", **counts)])
        out.append([ArraysWritten(step=step, arrays={})])
        out.append([trained(step=step, weights_digest=f"w{step + 1}")])
        out.append([synced(step + 1, f"w{step + 1}")[0]])
        end = reported(**counts)
        out.append([replace(end, step=step, report={**end.report, "step": step})])
        if step % 2 == 0:
            out.append([CheckpointWritten(step=step, files={"w": f"h{step}"})])
    return [*out, [RunFinished(weights_digest=f"w{STEPS}")]]


def _interleaved(chains: list[list[Event]], rng: random.Random) -> list[Event]:
    """The first chain, then the others merged at random, each in its own order."""
    merged = list(chains[0])
    rest = [list(chain) for chain in chains[1:]]
    while any(rest):
        chain = rng.choice([chain for chain in rest if chain])
        merged.append(chain.pop(0))
    return merged


class Runs(RuleBasedStateMachine):
    """A run that is crashed, cut and resumed at will."""

    @initialize(seed=st.integers(0, 3))
    def start(self, seed: int) -> None:
        self.content = seed
        self.folder = Path(tempfile.mkdtemp())
        self.timeline = Timeline.create(self.folder)
        self.events = [event for segment in segments(seed) for event in segment]
        self.whole = run_digest(self.events)
        self.at = 0
        self.alive = True

    @rule(count=st.integers(1, 25))
    @precondition(lambda self: self.alive)
    def go_on(self, count: int) -> None:
        for event in self.events[self.at : self.at + count]:
            if isinstance(event, Decision):
                self.timeline.decide(event.kind, event.key, lambda: 0.5)
            else:
                self.timeline.append(event)
        self.at = min(self.at + count, len(self.events))

    @rule(seed=st.integers(0, 20))
    @precondition(lambda self: self.alive and self.at < len(self.events))
    def a_wrong_event_is_refused(self, seed: int) -> None:
        before = (self.folder / "timeline.jsonl").stat().st_size
        folded = self.timeline.state.num_events
        wrong = RunFinished(weights_digest="never")
        try:
            self.timeline.append(wrong)
        except InvariantViolation:
            assert (self.folder / "timeline.jsonl").stat().st_size == before
            assert self.timeline.state.num_events == folded
        else:
            raise AssertionError("a run cannot finish with weights that were never published")

    @rule(lost=st.integers(0, 900), polite=st.booleans())
    @precondition(lambda self: self.alive)
    def crash(self, lost: int, polite: bool) -> None:
        if polite and 0 < self.at < len(self.events):
            self.timeline.append(RunInterrupted(reason="signal"))
        self.timeline.close()
        path = self.folder / "timeline.jsonl"
        os.truncate(path, max(0, path.stat().st_size - lost))
        self.alive = False

    @rule()
    @precondition(lambda self: not self.alive)
    def resume(self) -> None:
        self.timeline = Timeline.open_for_resume(self.folder)
        found = self.timeline.resumption
        assert found is not None
        self.alive = True
        if found.finished:
            self.at = len(self.events)
        elif found.checkpoint_step is None:
            self.at = 0
        else:
            self.at = 1 + next(
                i
                for i, event in enumerate(self.events)
                if isinstance(event, CheckpointWritten) and event.step == found.checkpoint_step
            )

    @invariant()
    def the_log_folds_to_the_same(self) -> None:
        if not hasattr(self, "alive") or not self.alive:
            return
        done = self.events[: self.at]
        assert self.timeline.run_digest() == run_digest(done)
        expected = check_all(done)
        state = self.timeline.state
        for name in ("cursor", "versions", "decisions", "open_samples", "next_step"):
            assert getattr(state, name) == getattr(expected, name), name
        assert {k: (s.status, s.reward) for k, s in state.samples.items()} == {
            k: (s.status, s.reward) for k, s in expected.samples.items()
        }
        if not self.timeline.replaying:
            logged = [record.event for record in read_log(self.folder / "timeline.jsonl").records]
            check_all(logged)
            assert run_digest(logged) == self.timeline.run_digest()
        if self.at == len(self.events):
            assert self.timeline.run_digest() == self.whole

    def teardown(self) -> None:
        if hasattr(self, "alive"):
            if self.alive:
                self.timeline.close()
            shutil.rmtree(self.folder)


Runs.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRuns = Runs.TestCase
