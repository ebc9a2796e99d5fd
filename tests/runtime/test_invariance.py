"""Settings that may not change a bit do not, through whole runs compared by `vime diff`; others do, and are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.runtime import faults
from tests.runtime.helpers import Judge, clean, prepared, run
from vime.pipeline.schema import bit_relevant
from vime.runtime.observer import RunOutcome
from vime.store.run_directory import RunView
from vime.timeline.diff import Difference, diff_runs
from vime.timeline.events import StepTrained
from vime.types import SampleId

CONTRACTS = {
    "float32": (),
    "bfloat16": ("contract.dtype=bfloat16",),
    "tp2dp2": ("contract.topology.tp=2", "contract.topology.dp=2", "stages.train.updates_per_step=2"),
}
COMMON = ("stages.evaluate.prompts=2", "stages.rollout.sampling.temperature=0.9")
WITH_KL = ("stages.train.loss.kl.coefficient=0.1", "stages.train.loss.kl.reference=initial")
SCHEDULES = {
    "few sequences": ("stages.rollout.max_num_seqs=2",),
    "one sequence": ("stages.rollout.max_num_seqs=1",),
    "small chunks": ("stages.rollout.max_batched_tokens=3",),
    "odd chunks": ("stages.rollout.max_batched_tokens=17",),
    "large blocks": ("stages.rollout.block_size=24",),
    "no prefix cache": ("stages.rollout.prefix_caching=false",),
    # two prompts of three blocks each are admitted, and both soon need a fourth
    "few blocks": ("stages.rollout.num_blocks=7", "stages.rollout.prefix_caching=false"),
    "one sample a micro-batch": ("stages.train.micro_batch_samples=1",),
    "three samples a micro-batch": ("stages.train.micro_batch_samples=3",),
    "checkpointing": ("stages.train.activation_checkpointing=true",),
    "two threads": ("threads=2",),
    "five threads": ("threads=5",),
    "through shared memory": ("stages.sync.transport=shm",),
    "through files": ("stages.sync.transport=disk",),
    "through files of what changed": ("stages.sync.transport=disk_delta",),
    "a checkpoint a step": ("checkpoint.every=1",),
    "everything": (
        "stages.rollout.max_num_seqs=3",
        "stages.rollout.max_batched_tokens=13",
        "stages.rollout.block_size=16",
        "stages.rollout.num_blocks=5",
        "stages.train.micro_batch_samples=2",
        "stages.train.activation_checkpointing=true",
        "stages.sync.transport=disk",
        "threads=3",
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Callable[..., tuple[Path, RunOutcome]]:
    """One run a contract, made when it is first asked for."""
    made: dict[tuple[str, ...], tuple[Path, RunOutcome]] = {}

    def base(*overrides: str) -> tuple[Path, RunOutcome]:
        if overrides not in made:
            directory = tmp_path_factory.mktemp("base") / "run"
            made[overrides] = directory, run(directory, *overrides)
        return made[overrides]

    return base


def gradients(directory: Path) -> list[tuple[str, str]]:
    """Digests of gradients and weights after every step."""
    events = (record.event for record in RunView.open(directory).records)
    return [(event.gradient_digest, event.weights_digest) for event in events if isinstance(event, StepTrained)]


def equal(left: tuple[Path, RunOutcome], right: tuple[Path, RunOutcome]) -> None:
    """No difference, by `diff` and by looking at the same things without it."""
    (a, one), (b, two) = left, right
    assert diff_runs(a, b) is None
    assert one.manifest_digest == two.manifest_digest and one.extra["run_digest"] == two.extra["run_digest"]
    assert gradients(a) == gradients(b) and all(digest for pair in gradients(a) for digest in pair)
    for step in range(2):
        arrays = [RunView.open(directory).step_arrays(step) for directory in (a, b)]
        assert len(arrays[0]["tokens"]) > 16 and arrays[0].keys() == arrays[1].keys()
        for name, array in arrays[0].items():
            assert name == "sampled_at" or array.tobytes() == arrays[1][name].tobytes(), name


# one contract tries every schedule; the others those that touch all parts
THOROUGH = [("float32", schedule) for schedule in SCHEDULES]
BRIEF = [(contract, s) for contract in CONTRACTS if contract != "float32" for s in ("everything", "few blocks")]


@pytest.mark.parametrize(("contract", "schedule"), THOROUGH + BRIEF)
def test_schedules_change_no_bit(bases, tmp_path, contract, schedule):
    overrides = (*COMMON, *CONTRACTS[contract])
    base = bases(*overrides)
    clean(base[1])
    other = run(tmp_path / "run", *overrides, *SCHEDULES[schedule])
    clean(other)
    equal(base, (tmp_path / "run", other))


def test_few_blocks_force_preemption_and_caching_shares(tmp_path):
    """The schedules above do what they are there for."""
    facts: list[dict] = []

    def watch(sides):
        facts.append({})
        close = sides.engine.close

        def closing():
            facts[-1].update(sides.engine.evidence()["facts"])
            close()

        sides.engine.close = closing

    run(tmp_path / "few", *COMMON, *SCHEDULES["few blocks"], plant=watch)
    run(tmp_path / "many", *COMMON, plant=watch)
    run(tmp_path / "chunks", *COMMON, *SCHEDULES["small chunks"], plant=watch)
    few, many, chunks = facts
    assert few["preemptions"] > 0 and few["prefix_hit_tokens"] == 0
    assert many["preemptions"] == 0 and many["prefix_hit_tokens"] > 0
    assert chunks["steps_prefill"] > many["steps_prefill"]


def test_an_engine_in_another_process_changes_no_bit(bases, tmp_path):
    base = bases(*COMMON)
    split = ("placement=split", "stages.sync.transport=disk_delta", "stages.rollout.max_num_seqs=3")
    other = run(tmp_path / "run", *COMMON, *split)
    clean(other)
    equal(base, (tmp_path / "run", other))


def test_the_reference_model_and_other_losses_are_invariant_too(bases, tmp_path):
    overrides = (*WITH_KL, "stages.train.loss.normalise=sequence_mean", "stages.filter.zero_variance=drop")
    base = bases(*overrides)
    other = run(tmp_path / "run", *overrides, *SCHEDULES["everything"])
    equal(base, (tmp_path / "run", other))
    assert base[1].reports[0]["reference_kl"] == 0.0 and base[1].reports[1]["reference_kl"] > 0


def test_every_setting_that_is_declared_free_of_bits_was_varied(tmp_path):
    """A new key of that kind needs a schedule above."""
    from vime.pipeline.schema import Pipeline

    def free(section, prefix=""):
        for name, field in section.model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("bits") is False:
                yield prefix + name
            elif hasattr(field.annotation, "model_fields"):
                yield from free(field.annotation, f"{prefix}{name}.")

    varied = {text.partition("=")[0] for schedule in SCHEDULES.values() for text in schedule}
    varied |= {
        "name",
        "run_directory",
        "placement",
        "checkpoint",
        "device",
    }  # of all runs, of the split ones, of "a checkpoint a step", of gpu/test_run.py where there is a GPU
    # the same weights from another folder have the same digest; kv_memory_bytes only computes num_blocks; moments are
    # somewhere else than on the device only with a GPU: audit/interpreted/test_device_weights.py
    others = {"model.path", "stages.rollout.kv_memory_bytes", "stages.train.moments"}
    assert set(free(Pipeline)) - varied == others
    one, other = (
        bit_relevant(prepared(tmp_path / x, *o).pipeline) for x, o in (("a", ()), ("b", SCHEDULES["everything"]))
    )
    assert one == other


# ------------------------------------------------------------------------------------------ the negative twins


def found(base: tuple[Path, RunOutcome], directory: Path) -> Difference:
    difference = diff_runs(base[0], directory)
    assert difference is not None
    return difference


def test_another_seed_is_named_with_its_first_token(bases, tmp_path):
    run(tmp_path / "run", *COMMON, "seed=8")
    difference = found(bases(*COMMON), tmp_path / "run")
    assert (difference.event, difference.field, difference.left, difference.right) == ("run_started", "run_seed", 7, 8)
    assert difference.settings == (("seed", 7, 8),)
    computed = difference.consequence
    assert (computed.event, computed.field) == ("version_published", "digest")  # the initial weights
    element = computed.element
    assert (element.step, element.array, element.index, element.sample) == (0, "tokens", (0,), SampleId("train", 0, 0))
    assert int(element.left.split()[0]) >> element.bit & 1 != int(element.right.split()[0]) >> element.bit & 1


def test_another_learning_rate_is_named_where_it_first_acts(bases, tmp_path):
    run(tmp_path / "run", *COMMON, "stages.train.optimizer.learning_rate=5.0001e-3")
    difference = found(bases(*COMMON), tmp_path / "run")
    assert difference.settings == (("stages.train.optimizer.learning_rate", 5e-3, 5.0001e-3),)
    computed = difference.consequence
    assert (computed.event, computed.step, computed.field) == ("step_trained", 0, "weights_digest")
    assert computed.element.step == 1 and computed.element.bit is not None
    assert "step 0, step_trained" in difference.sentence() and "first at bit" in difference.sentence()


def test_another_temperature_is_named_at_the_first_distribution(bases, tmp_path):
    run(tmp_path / "run", "stages.rollout.sampling.temperature=0.9000001")
    difference = found(bases("stages.rollout.sampling.temperature=0.9"), tmp_path / "run")
    assert difference.settings == (("stages.rollout.sampling.temperature", 0.9, 0.9000001),)
    computed = difference.consequence
    assert (computed.event, computed.step) == ("sample_finished", 0)
    assert (computed.element.array, computed.element.sample) == ("rollout_logprobs", SampleId("train", 0, 0))


def test_one_other_reward_is_named(bases, tmp_path, monkeypatch):
    base = bases(*COMMON)
    monkeypatch.setattr(Judge, "generous_to", "train/1/2")
    run(tmp_path / "run", *COMMON)
    difference = found(base, tmp_path / "run")
    assert (difference.event, difference.step, difference.field) == ("reward_given", 0, "reward")
    assert difference.settings == () and difference.consequence is None
    element = difference.element
    assert (element.array, element.sample) == ("rewards", SampleId("train", 1, 2)) and element.bit is not None


def test_another_claimed_topology_computes_another_function(bases, tmp_path):
    """Claims are part of the contract: leaves are paid for only where they are claimed."""
    run(tmp_path / "run", *COMMON, "contract.topology.dp=2")
    difference = found(bases(*COMMON), tmp_path / "run")
    assert difference.settings == (("contract.topology.dp", 1, 2),)
    # the forward is the same, the reduction over samples is cut in two
    assert (difference.consequence.event, difference.consequence.step) == ("step_trained", 0)


def test_one_flipped_bit_of_a_gradient_is_named(bases, tmp_path):
    """The forward of step 0 is equal; what differs is what the step left."""

    def plant(sides):
        trainer = sides.trainer
        whole = trainer._optimizer.update

        def update(grads):
            if trainer.updates == 0:
                faults.flip(grads["model.norm.weight"], 0, 20)
            return whole(grads)

        trainer._optimizer.update = update

    run(tmp_path / "run", *COMMON, plant=plant)
    difference = found(bases(*COMMON), tmp_path / "run")
    assert (difference.event, difference.step, difference.settings) == ("step_trained", 0, ())
    assert difference.element is not None and difference.element.step == 1
    assert np.all([a != b for a, b in zip(gradients(bases(*COMMON)[0]), gradients(tmp_path / "run"), strict=True)])
