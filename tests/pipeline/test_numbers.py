"""Any number in any numeric key: a sentence, or a pipeline that can be built. No traceback, no late failure."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.pipeline.helpers import problems_of, text
from vime.cli.main import invoke
from vime.pipeline.loading import load_text, read_text, resolved_yaml
from vime.pipeline.partial import section_type
from vime.pipeline.prepare import Prepared, prepare
from vime.pipeline.problems import PipelineError
from vime.pipeline.ranges import BETA, RANGES
from vime.pipeline.schema import Pipeline, value_at
from vime.runtime.assembly import trainer_config
from vime.runtime.sides import SideSpecification, engine_config, pipeline_contract
from vime.train.estimators import EstimatorConfig


def numeric_keys(section: type[BaseModel] = Pipeline, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Dotted keys that take a number, and whether it is one with a point."""
    for name, info in section.model_fields.items():
        inner = section_type(info.annotation)
        if inner is not None:
            yield from numeric_keys(inner, f"{prefix}{name}.")
            continue
        kinds = {plain(item) for item in (typing.get_args(info.annotation) or (info.annotation,))}
        if kinds & {int, float}:
            yield prefix + name, float in kinds


def plain(annotation: Any) -> Any:
    """A type without what is said about it."""
    return plain(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is Annotated else annotation


KEYS = dict(numeric_keys())
FREE = (
    *(
        f"model.overrides.{name}"
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "head_dim")
    ),
    *(f"model.overrides.{name}" for name in ("num_kv_heads", "vocab_size", "max_position", "rms_norm_eps")),
    "data.parameters.digits",
    "data.parameters.held_out",
)
LISTS = {
    "stages.train.optimizer.betas": "[{}, 0.9]",
    "stages.rollout.sampling.stop_token_ids": "[{}]",
}
NUMBERS = st.one_of(
    st.integers(-(2**80), 2**80),
    st.integers(0, 200),
    st.floats(),
    st.floats(0, 1e4),
    st.sampled_from([5e-324, 1e-46, 1e-45, 1e-38, 1e300, 1.7e308, 2**31 - 1, 2**31, 2**63, 2**70, 0.0, -0.0]),
)


def written(value: float) -> str:
    """A number as YAML has it."""
    if isinstance(value, float) and not np.isfinite(value):
        return ".nan" if np.isnan(value) else ".inf" if value > 0 else "-.inf"
    return repr(value)


def test_the_schema_has_the_keys_that_are_tried() -> None:
    assert {"seed", "steps", "threads", "stages.reward.timeout_s", "stages.train.optimizer.eps"} <= set(KEYS)
    assert len(KEYS) > 35 and set(RANGES) <= set(KEYS)
    assert {key for key, pointed in KEYS.items() if pointed} - set(LISTS) == {*RANGES, FINAL_FRACTION}


FINAL_FRACTION = "stages.train.optimizer.final_fraction"  # any number from 0 to 1 does what it says


@settings(max_examples=150)
@given(key=st.sampled_from([*KEYS, *FREE, *LISTS]), value=NUMBERS)
@example(key="stages.rollout.sampling.temperature", value=1e300)
@example(key="stages.rollout.sampling.temperature", value=1e-46)
@example(key="stages.rollout.sampling.top_k", value=2**70)
@example(key="threads", value=2**70)
@example(key="stages.rollout.block_size", value=2**40)
@example(key="stages.rollout.block_size", value=2**30)
@example(key="stages.rollout.num_blocks", value=2**70)
@example(key="stages.rollout.max_num_seqs", value=2**31 - 1)
@example(key="stages.rollout.kv_memory_bytes", value=2**62)
@example(key="stages.reward.timeout_s", value=1e300)
@example(key="stages.train.optimizer.eps", value=1e-300)
@example(key="stages.train.optimizer.max_grad_norm", value=1e-300)
@example(key="stages.train.optimizer.learning_rate", value=1e300)
@example(key="stages.train.optimizer.weight_decay", value=1e300)
@example(key="model.overrides.num_layers", value=2**30)
@example(key="model.overrides.vocab_size", value=2**30)
@example(key="data.parameters.digits", value=2.5)
@example(key="checkpoint.keep", value=2**31 - 1)
@example(key="steps", value=2**31 - 1)
def test_any_number_in_any_key(key: str, value: float) -> None:
    override = f"{key}={LISTS.get(key, '{}').format(written(value))}"
    more = ["stages.train.loss.kl.reference=initial"] if key.endswith("kl.coefficient") else []
    try:
        prepared = prepare(read_text(text(), "small.yaml", [override, *more]))
    except PipelineError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.key and " " in problem.message and len(str(problem)) < 1000
        return
    can_be_built(prepared)


def can_be_built(prepared: Prepared) -> None:
    """Everything that a run makes of numbers before it starts, with overflow and loss in float32 as errors."""
    p = prepared.pipeline
    with np.errstate(all="raise"):
        config = trainer_config(p)
        pipeline_contract(p, prepared.config)
        engine_config(SideSpecification(p, prepared.config, prepared.num_blocks, prepared.longest_sequence), "native-0")
        advantage = p.stages.advantage
        EstimatorConfig(group_size=p.stages.rollout.samples_per_prompt, epsilon=advantage.epsilon)
        for key in RANGES:
            number = value_at(p, key)
            if isinstance(number, float) and number != 0 and key != "stages.reward.timeout_s":
                assert np.isfinite(np.float32(number)) and np.float32(number) > 2.0**-126, key
        assert np.float32(1 + p.stages.train.loss.clip_high) > 1 > np.float32(1 - p.stages.train.loss.clip_low) > 0
        assert all(np.float32(beta) < 1 for beta in p.stages.train.optimizer.betas)
        updates = (0, p.steps * p.stages.train.updates_per_step - 1)
        assert all(config.optimizer.schedule.learning_rate(update) >= 0 for update in updates)
    assert load_text(resolved_yaml(p), "again.yaml").pipeline == p


@pytest.mark.parametrize("key", [*RANGES, "stages.train.optimizer.betas"])
def test_bounds_hold_from_both_sides(key: str) -> None:
    allowed = RANGES.get(key, BETA)
    inside = [allowed.high, *([allowed.low] if key in RANGES else [0.0]), *([0.0] if allowed.or_zero else [])]
    outside = [allowed.high * 1.001, *([allowed.low / 1.001] if allowed.low else [])]
    more = ["stages.train.require_full_distribution=false"]
    if key.endswith("kl.coefficient"):
        more.append("stages.train.loss.kl.reference=initial")
    if key.endswith("weight_decay"):
        more.append("stages.train.optimizer.learning_rate=1e-9")

    def named(value: float) -> set[str]:
        override = f"{key}={LISTS.get(key, '{}').format(written(value))}"
        found = problems_of(lambda: prepare(read_text(text(), "small.yaml", [*more, override])))
        return {problem.key for problem in found if problem.key.startswith(key)}

    assert [value for value in inside if named(value)] == []
    assert [value for value in outside if not named(value)] == []


ABSURD = {
    "a NUL in the run's folder": ('run_directory="a\\0b"', "NUL character"),
    "a name of 300 characters": (f"run_directory={'x' * 300}", "a part of 300 bytes"),
    "a path of 5000 characters": (f"run_directory={'x/' * 2500}", "a path of"),
    "the root": ("run_directory=/", "no name of its own"),
    "a NUL in the model's path": ('model={path: "a\\0b"}', "NUL character"),
    "a model with a long name": (f"model={{path: {'x' * 300}}}", "a part of 300 bytes"),
    "a NUL in a function's file": ('stages.reward.function="a\\0b.py:f"', "cannot be a file"),
    "a function in a long name": (f"stages.reward.function={'x' * 300}.py:f", "cannot be a file"),
    "a number of 5000 digits": (f"steps={'9' * 5000}", "a whole number is needed"),
    "a number of 5000 hexadecimal digits": (f"steps=0x{'f' * 5000}", "a whole number is needed"),
    "brackets": (f"data.parameters={'[' * 3000}", "nested"),
    "sections": (f"data.parameters={'{a: ' * 100}1{'}' * 100}", "nested"),
    "threads": ("threads=1000000", "processor"),
}


@pytest.mark.parametrize(("override", "words"), ABSURD.values(), ids=ABSURD.keys())
def test_absurd_values_are_named(override: str, words: str) -> None:
    found = problems_of(lambda: prepare(read_text(text(), "small.yaml", [override])))
    assert any(words in str(problem) for problem in found), found
    assert all(len(str(problem)) < 500 for problem in found)


@pytest.mark.parametrize(
    "content",
    ["[" * 3000, "a:\n" + "".join(" " * n + "- \n" for n in range(1000)), "a: &a [1]\n" + "".join(
        f"b{n}: &b{n} [{', '.join([f'*b{n - 1}' if n else '*a'] * 10)}]\n" for n in range(12)
    )],
    ids=["brackets", "lists", "aliases"],
)  # fmt: skip
def test_files_that_no_parser_likes(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "absurd.yaml"
    file.write_text(content)
    assert invoke(["check", str(file)]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message and len(message) < 1000
