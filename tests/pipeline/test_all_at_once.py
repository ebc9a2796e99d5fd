"""One answer holds everything that is wrong: mistakes of form hide none of meaning, and cause none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.helpers import problems_of, text
from vime.cli.main import invoke
from vime.pipeline.loading import read_text
from vime.pipeline.prepare import prepare
from vime.pipeline.schema import MissingValue

BROKEN = """\
name: broken
seed: -1
run_directory: {folder}/taken
stepz: 40
steps: 2
model: {{preset: tiny-qwen3, overides: {{}}}}
placement: split
data:
  source: jsonl
  parameters: {{train: {folder}/nowhere.jsonl}}
stages:
  rollout: {{prompts_per_step: 3, sampling: {{max_new_tokens: 4}}}}
  reward: {{function: rewards.nothing.score}}
  filter: {{function: rewards.py}}
  train: {{optimizer: {{learning_rate: high, betas: [0.9]}}, updates_per_step: 2}}
"""


def keys_of(text: str, *overrides: str) -> dict[str, str]:
    """Key -> sentence of everything that is wrong."""
    return {p.key: str(p) for p in problems_of(lambda: prepare(read_text(text, "b.yaml", overrides)))}


def test_form_and_meaning_in_one_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file")
    file = tmp_path / "b.yaml"
    file.write_text(BROKEN.format(folder=tmp_path))
    found = keys_of(file.read_text())
    expected = {
        "seed": "at least 0",
        "run_directory": "is a file",
        "stepz": "did you mean 'steps'",
        "model.overides": "did you mean 'overrides'",
        "stages.sync.transport": "placement: split",
        "data.parameters": "there is no data file",
        "stages.reward.function": "there is no module 'rewards.nothing'",
        "stages.filter.function": "write rewards.py:NAME",
        "stages.train.optimizer.learning_rate": "'high' is not possible: a number is needed",
        "stages.train.optimizer.betas": "[0.9] is not possible: a list of 2 numbers is needed",
        "stages.train.updates_per_step": "does not divide",
    }
    assert set(found) == set(expected)
    for key, words in expected.items():
        assert words in found[key]
    assert invoke(["check", str(file)]) == 2
    assert f"{len(expected)} problems" in capsys.readouterr().err
    assert invoke(["run", str(file)]) == 2
    assert capsys.readouterr().err.count("b.yaml:") == len(expected)


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        ("steps=x", {"steps"}),  # how many rows are needed is unknown, so nothing is said about it
        ("stages.rollout=3", {"stages.rollout"}),
        ("stages=3", {"stages"}),
        ("model=3", {"model"}),
        ("data=3", {"data"}),
        ("contract=3", {"contract"}),
        ("stages.evaluate.prompts=-1", {"stages.evaluate.prompts"}),
        ("stages.rollout.sampling.stop_token_ids=[0, x]", {"stages.rollout.sampling.stop_token_ids[1]"}),
        ("run_directory=", {"run_directory"}),
    ],
)
def test_a_mistake_of_form_invents_none_of_meaning(override: str, wrong: set[str]) -> None:
    assert set(keys_of(text(), override)) == wrong


def test_a_misspelt_key_does_not_hold_its_default() -> None:
    file = text().replace("evaluate: {prompts: 5}", "evaluate: {prompt: 5, every: 1}")
    assert set(keys_of(file)) == {"stages.evaluate.prompt"}  # and not: every, but prompts is 0


def test_a_key_that_stands_there_twice_is_not_guessed_at() -> None:
    assert set(keys_of(text() + "steps: 400\n")) == {"steps"}


def test_a_hole_is_never_a_default() -> None:
    loaded = read_text(text(), "b.yaml", ["threads=x", "stages.rollout.sampling.temperature=-1"])
    assert loaded.pipeline.stages.rollout.sampling.max_new_tokens == 3
    assert loaded.pipeline.stages.evaluate.prompts == 5
    for read in (lambda: loaded.pipeline.threads, lambda: loaded.pipeline.stages.rollout.sampling.temperature):
        with pytest.raises(MissingValue):
            read()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stages.train.optimizer.betas=0.9", "0.9 is not possible: a list of 2 numbers is needed"),
        ("stages.train.optimizer.betas=[0.9, 0.9, 0.9]", "[0.9, 0.9, 0.9] is not possible: a list of 2 numbers"),
        ("stages.train.optimizer.betas=nothing", "'nothing' is not possible: a list of 2 numbers is needed"),
        ("stages.train.optimizer.betas=[0.9, 1.0]", "1.0 is not possible: it has to be below 1"),
        ("stages.rollout.sampling.stop_strings=abc", "'abc' is not possible: a list of texts is needed"),
        ("stages.rollout.sampling.stop_token_ids=5", "5 is not possible: a list of whole numbers is needed"),
        ("stages.rollout.prefix_caching=no", "'no' is not possible: true or false is needed: false"),
        ("steps=1e3", "1000.0 is not possible: a whole number is needed, written without point and exponent: 1000"),
        ("steps=nothing", "'nothing' is not possible: a whole number is needed"),
        ("steps=", "an empty value is not possible: a whole number is needed"),
        ("steps=0", "0 is not possible: it has to be at least 1"),
        ("name=5", "5 is not possible: a text is needed; in quotes it is one: '5'"),
        ("name=''", "an empty text is not possible"),
        ("model.overrides={num_layers: nothing}", "'nothing' is not possible: a whole number is needed"),
    ],
)
def test_sentences_are_in_the_words_of_the_file(override: str, sentence: str) -> None:
    (found,) = problems_of(lambda: prepare(read_text(text(), "b.yaml", [override])))
    assert sentence in str(found)
