"""Invariants of steps, checkpoints and the end of a run."""

from __future__ import annotations

from itertools import pairwise

from vime.timeline.events import (
    ArraysRestored,
    ArraysWritten,
    BatchAssigned,
    CheckpointWritten,
    RunFinished,
    StepCompared,
    StepFinished,
    StepTrained,
)
from vime.timeline.rules import Broken, require
from vime.timeline.state import State, StepState

OWN_FORWARDS = ("trainer_score", "trainer_forward")
"""Cases in which the trainer evaluates tokens itself."""

REPORTED_COUNTS = (
    "num_tokens",
    "compared_tokens",
    "incomparable_tokens",
    "mismatch_count",
    "distribution_mismatch_count",
)
"""What a report repeats of the comparison."""


def assigned(state: State, event: BatchAssigned) -> None:
    """Samples of a batch are finished, rewarded, whole groups, in sample order, fresh enough, and in no other step."""
    require(event.step == state.next_step, f"step {state.next_step} is due: steps are consecutive")
    last = state.last_step
    require(last is None or state.steps[last].finished is not None, f"step {last} is not finished")
    latest = state.latest_version
    require(
        latest is not None and event.policy_version == latest.version,
        f"the policy is version {None if latest is None else latest.version} (invariant 2)",
    )
    ids = event.sample_ids
    require(len(ids) > 0, "a step without samples trains on nothing")
    require(all(a < b for a, b in pairwise(ids)), "the samples are not in ascending sample order")
    budget = state.run.max_staleness if state.run is not None else 0
    for sample_id in ids:
        require(sample_id.namespace == "train", f"{sample_id} is not a training sample")
        sample = state.samples.get(sample_id)
        if sample is None:
            raise Broken(f"sample {sample_id} was not started (invariant 1)")
        if sample.status == "assigned":
            raise Broken(f"sample {sample_id} is assigned to step {sample.step} already (invariant 1)")
        require(sample.status == "finished", f"sample {sample_id} is {sample.status}, not finished (invariant 1)")
        require(sample.reward is not None, f"sample {sample_id} has no reward")
        oldest = event.policy_version if sample.oldest_version is None else sample.oldest_version
        require(
            event.policy_version - oldest <= budget,
            f"sample {sample_id} is of version {oldest}, {event.policy_version - oldest} versions behind the policy "
            f"(version {event.policy_version}); the staleness budget is {budget} (invariant 5)",
        )
    members = set(ids)
    for prompt_index in sorted({i.prompt_index for i in ids}):
        for sample_id in state.group("train", prompt_index):
            left_out = sample_id not in members and state.samples[sample_id].status != "dropped"
            require(
                not left_out, f"group {prompt_index} is incomplete: {sample_id} is neither in the batch nor dropped"
            )


def _step(state: State, step: int) -> StepState:
    known = state.steps.get(step)
    if known is None:
        raise Broken(f"no batch was assigned to step {step}")
    require(known.finished is None, f"step {step} is finished already")
    return known


def arrays_written(state: State, event: ArraysWritten) -> None:
    """Arrays are announced once."""
    require(_step(state, event.step).arrays is None, f"the arrays of step {event.step} were written already")


def arrays_restored(state: State, event: ArraysRestored) -> None:
    """Only what was announced can be made again."""
    known = state.steps.get(event.step)
    require(known is not None and known.arrays is not None, f"no arrays of step {event.step} were announced")


def compared(state: State, event: StepCompared) -> None:
    """The counts add up, only comparable tokens were compared, and the trainer computed its side itself."""
    step = _step(state, event.step)
    require(step.compared is None, f"step {event.step} was compared already")
    samples = [state.samples[i] for i in step.assigned.sample_ids]
    total = sum(sample.num_tokens for sample in samples)
    require(event.num_tokens == total, f"the samples of step {event.step} have {total} tokens (invariant 6)")
    reasons = event.incomparable_tokens
    bad = {reason: count for reason, count in reasons.items() if not reason or count <= 0}
    require(not bad, f"incomparable tokens need a reason and a count above 0, not {bad} (invariant 6)")
    require(
        event.compared_tokens >= 0 and event.compared_tokens + sum(reasons.values()) == event.num_tokens,
        f"{event.compared_tokens} compared and {sum(reasons.values())} incomparable tokens are not "
        f"{event.num_tokens}: every token is compared or counted under a reason (invariant 6)",
    )
    version = step.assigned.policy_version
    comparable = sum(sample.comparable_tokens.get(version, 0) for sample in samples)
    require(
        event.compared_tokens <= comparable,
        f"{event.compared_tokens} tokens were compared, but only {comparable} are of version {version} with all "
        "their KV (invariant 6)",
    )
    for name in ("mismatch_count", "distribution_mismatch_count"):
        count = getattr(event, name)
        if event.compared_tokens == 0:
            require(count is None, f"nothing was compared, so {name} is unknown, not {count} (invariant 6)")
        else:
            good = count is not None and 0 <= count <= event.compared_tokens
            require(good, f"{name} is {count} of {event.compared_tokens} compared tokens (invariant 6)")
    if event.compared_tokens > 0:
        require(
            event.case in OWN_FORWARDS,
            f"the trainer's log-probabilities come from {event.case!r}, not from one of {OWN_FORWARDS} (invariant 7)",
        )
        require(
            event.forward_tokens >= event.compared_tokens,
            f"the trainer's layers saw {event.forward_tokens} tokens, fewer than the {event.compared_tokens} compared: "
            "the values are not all its own (invariant 7)",
        )
        published = state.versions[version].digest
        require(
            event.manifest_digest == published,
            f"the trainer evaluated weights {event.manifest_digest}; version {version} is {published} (invariant 7)",
        )


def trained(state: State, event: StepTrained) -> None:
    """A step trains once, after its comparison."""
    step = _step(state, event.step)
    require(step.trained is None, f"step {event.step} was trained already")
    require(step.compared is not None, f"step {event.step} was not compared: there is no evidence (invariant 7)")
    require(bool(event.weights_digest), "the digest of the trained weights is missing")


def finished(state: State, event: StepFinished) -> None:
    """A step ends when it is compared, trained, published and stored, and no sample is left over."""
    step = _step(state, event.step)
    missing = [name for name in ("arrays", "compared", "trained") if getattr(step, name) is None]
    require(not missing, f"step {event.step} is not complete: {', '.join(missing)} missing")
    if step.compared is not None:
        for name in ("step", *REPORTED_COUNTS):
            counted, reported = getattr(step.compared, name), event.report.get(name)
            require(counted == reported, f"the report says {name} {reported}, the comparison {counted} (invariant 6)")
    latest = state.latest_version
    digest = step.trained.weights_digest if step.trained is not None else ""
    require(
        latest is not None and latest.version > step.assigned.policy_version and latest.digest == digest,
        f"the weights of step {event.step} ({digest}) were not published",
    )
    if state.run is not None and state.run.max_staleness == 0:
        _none_left(state)


def _none_left(state: State) -> None:
    left = sorted(state.open_samples)
    named = ", ".join(map(str, left[:5])) + (", ..." if len(left) > 5 else "")
    require(not left, f"{len(left)} samples are neither assigned nor dropped: {named} (invariant 1)")


def checkpoint_written(state: State, event: CheckpointWritten) -> None:
    """A checkpoint stands between two steps."""
    last = state.last_step
    done = last == event.step and state.steps[event.step].finished is not None
    require(done, f"a checkpoint is written after a finished step; the last step is {last}")
    require(event.step not in state.checkpoints, f"step {event.step} has a checkpoint already")
    require(len(event.files) > 0, "a checkpoint without files restores nothing")


def run_finished(state: State, event: RunFinished) -> None:
    """All declared steps are finished, and every sample is assigned or dropped."""
    run = state.run
    due = 0 if run is None else run.steps
    done = sum(step.finished is not None for step in state.steps.values())
    require(done == due == len(state.steps), f"{done} of {due} steps are finished")
    _none_left(state)
    latest = state.latest_version
    digest = None if latest is None else latest.digest
    require(event.weights_digest == digest, f"the last published weights are {digest}")
