"""YAML with places, overrides, and everything wrong at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.helpers import loaded, problems_of, text
from vime.pipeline.loading import load_pipeline, load_text, resolved_yaml
from vime.pipeline.problems import PipelineError
from vime.pipeline.schema import Pipeline, bit_relevant
from vime.pipeline.yaml_source import parse, scalar


def test_resolved_file_loads_to_the_same_pipeline() -> None:
    pipeline = loaded().pipeline
    again = load_text(resolved_yaml(pipeline), "pipeline.yaml").pipeline
    assert again == pipeline
    assert "warmup_updates: 0" in resolved_yaml(pipeline)


@pytest.mark.parametrize(
    "word", ["1e-3", "no", "010", "null", "~", "0x10", ".nan", "true", "", "a: b", "a # b", "2024-01-01"]
)
def test_strings_that_look_like_something_else_survive_the_resolved_file(word: str) -> None:
    pipeline = loaded().pipeline.model_copy(update={"name": word})
    source = parse(resolved_yaml(pipeline), "x")
    assert source.data["name"] == word


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive_the_resolved_file_bit_for_bit(value: float) -> None:
    pipeline = loaded().pipeline
    data = pipeline.data.model_copy(update={"parameters": {"x": value}})
    read = parse(resolved_yaml(pipeline.model_copy(update={"data": data})), "x").data["data"]["parameters"]["x"]
    assert isinstance(read, float)
    assert read.hex() == value.hex()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("1_000", 1000), ("-3", -3), ("0x1F", 31), ("no", "no"),
        ("010", "010"), ("00.5", "00.5"), ("True", True), ("NULL", None), ("tRue", "tRue"), ("-.inf", -math.inf),
    ],
)  # fmt: skip
def test_scalars(written: str, value: object) -> None:
    assert scalar(written) == value
    assert type(scalar(written)) is type(value)


BROKEN = """\
name: quick
seed: -1
run_directory: runs/x
stepz: 40
steps: "40"
model: {preset: tiny-qwen3, overides: {}}
contract: {dtype: flaot32}
data:
  source: a
  source: b
stages:
  rollout: {prompts_per_step: 010, sampling: {temperature: .nan, max_new_tokens: true, stop_strings: [a, 3]}}
  reward: {}
  train: {optimizer: {learning_rate: 1e-3, betas: [0.9]}}
"""


def test_everything_wrong_is_reported_at_once_with_its_place() -> None:
    found = {(p.line, p.column, p.key): p.nearest for p in problems_of(lambda: load_text(BROKEN, "b.yaml"))}
    assert found == {
        (2, 1, "seed"): None,
        (4, 1, "stepz"): "steps",
        (5, 1, "steps"): None,
        (6, 29, "model.overides"): "overrides",
        (7, 12, "contract.dtype"): "float32",
        (10, 3, "data.source"): None,
        (12, 13, "stages.rollout.prompts_per_step"): None,
        (12, 47, "stages.rollout.sampling.temperature"): None,
        (12, 66, "stages.rollout.sampling.max_new_tokens"): None,
        (12, 106, "stages.rollout.sampling.stop_strings[1]"): None,
        (13, 3, "stages.reward.function"): None,
        (14, 44, "stages.train.optimizer.betas"): None,
    }


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepz=3", "steps"),
        ("stages.train.optimizer.learningrate=1", "stages.train.optimizer.learning_rate"),
        ("stages.train.optimizer.lr=1", "its keys are learning_rate, betas, "),
        ("steps.a=1", "'steps' has no keys inside"),
        ("steps", "KEY.KEY=VALUE"),
        ("steps=[1", "not YAML"),
        ("steps='3'", "a whole number"),
        ("stages=3", "not a section"),
    ],
)
def test_a_wrong_override_is_named(override: str, words: str) -> None:
    found = problems_of(lambda: loaded(override))
    assert any(override in p.file and words in str(p) for p in found), found


def test_overrides_are_yaml_values_and_the_last_one_wins() -> None:
    pipeline = loaded(
        "steps=5", "data.parameters.digits=3", "steps=6", "stages.sync.transport=shm", "threads=null"
    ).pipeline
    assert (pipeline.steps, pipeline.data.parameters["digits"], pipeline.threads) == (6, 3, None)
    assert pipeline.stages.sync.transport == "shm"


@pytest.mark.parametrize(
    "content", ["", "- a", "a: [", "a: &x {b: *x}", "<<: {a: 1}", "? [a]\n: 1", "a: !python/tuple [1]", "\t"]
)
def test_files_that_are_no_pipeline(content: str) -> None:
    with pytest.raises(PipelineError):
        load_text(content, "x.yaml")


def test_a_missing_file_is_a_problem(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PipelineError, match="there is no such file"):
        load_pipeline(tmp_path / "nowhere.yaml")


def test_bits_ignore_exactly_the_marked_keys() -> None:
    base = bit_relevant(loaded().pipeline)
    same = [
        "name=other", "run_directory=elsewhere", "threads=1", "placement=split", "checkpoint={every: 1, keep: 1}",
        "stages.sync.transport=disk", "stages.rollout.max_num_seqs=3", "stages.rollout.max_batched_tokens=7",
        "stages.rollout.block_size=8", "stages.rollout.num_blocks=99", "stages.rollout.kv_memory_bytes=1000000",
        "stages.rollout.prefix_caching=false", "stages.train.micro_batch_samples=3",
        "stages.train.activation_checkpointing=true",
    ]  # fmt: skip
    for override in same:
        assert bit_relevant(loaded(override).pipeline) == base, override
    other = [
        "seed=8", "steps=3", "contract.dtype=bfloat16", "contract.topology.tp=2", "stages.train.updates_per_step=2",
        "stages.rollout.sampling.temperature=0.9", "data.parameters.digits=3", "numerics.rollout=native",
    ]  # fmt: skip
    for override in other:
        assert bit_relevant(loaded(override).pipeline) != base, override


def test_pipelines_are_frozen() -> None:
    pipeline = loaded().pipeline
    with pytest.raises(ValueError, match="frozen"):
        pipeline.steps = 9  # type: ignore[misc]
    assert isinstance(pipeline, Pipeline)
    assert text().startswith("name: small")
