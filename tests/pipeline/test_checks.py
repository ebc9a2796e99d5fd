"""What is impossible together, or here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.helpers import loaded, problems_of
from vime.pipeline.prepare import prepare
from vime.runtime.sides import optimizer_config


def found(*overrides: str, directory: Path | str = "no-such-run") -> list[tuple[str, str]]:
    """Key and sentence of every problem."""
    pipeline = loaded(*overrides, directory=directory)
    return [(p.key, str(p)) for p in problems_of(lambda: prepare(pipeline))]


def test_a_good_pipeline_is_prepared() -> None:
    prepared = prepare(loaded())
    assert [prompt.prompt_index for prompt in prepared.train_prompts.take(0, 3)] == [0, 1, 2]
    assert prepared.eval_prompts is not None
    assert (prepared.longest_prompt, prepared.num_blocks, prepared.stop_token_ids) == (3, 256, (0,))
    assert [stage.name for stage in prepared.graph.order()][:2] == ["rollout", "reward"]
    assert prepared.sampling("eval").greedy
    assert not prepared.sampling("train").greedy


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["model.path=x"], "model", ["model.preset", "model.path"]),
        (["model.preset=null"], "model", ["neither"]),
        (["model.preset=tiny-qwen"], "model.preset", ["tiny-qwen3"]),
        (["model.preset=null", "model.path=nowhere"], "model.path", ["nowhere", "does not exist"]),
        (["model.overrides={num_layer: 3}"], "model.overrides.num_layer", ["num_layers"]),
        (["model.overrides={num_layers: 3.0}"], "model.overrides.num_layers", ["a whole number"]),
        (["model.overrides={head_dim: 15}"], "model.overrides", ["odd"]),
        (["model.overrides={vocab_size: 10}"], "model", ["24", "10"]),
        (["model.tokenizer=nowhere"], "model.tokenizer", ["nowhere"]),
        (["contract.topology.tp=3"], "contract.topology.tp", ["power of two"]),
        (["contract.topology.tp=4"], "contract.topology.tp", ["num_kv_heads = 2"]),
        (["contract.topology.cp=2"], "contract.topology.cp", ["only 1"]),
        (["contract.topology.dp=32"], "contract.topology.dp", ["16 samples"]),
        (["placement=split"], "stages.sync.transport", ["memory", "placement: split"]),
        (["numerics.trainer=native"], "numerics.trainer", ["on_mismatch"]),
        (["max_staleness=1"], "max_staleness", ["not implemented"]),
        (["stages.rollout.sampling.top_p=0.9"], "stages.rollout.sampling.top_p", ["require_full_distribution"]),
        (["stages.rollout.sampling.top_k=5"], "stages.rollout.sampling.top_k", ["require_full_distribution"]),
        (["stages.rollout.num_blocks=9", "stages.rollout.kv_memory_bytes=9"], "stages.rollout.num_blocks",
         ["kv_memory_bytes"]),
        (["stages.rollout.block_size=12"], "stages.rollout.block_size", ["multiple of 8"]),
        (["stages.rollout.kv_memory_bytes=9"], "stages.rollout.kv_memory_bytes", ["no KV block"]),
        (["stages.rollout.num_blocks=1", "stages.rollout.sampling.max_new_tokens=20"], "stages.rollout.num_blocks",
         ["prompt + max_new_tokens", "needs 2"]),
        (["stages.rollout.sampling.max_new_tokens=510"], "stages.rollout.sampling.max_new_tokens",
         ["512", "at most 509"]),
        (["model.overrides={max_position: 3}"], "data.source", ["longest prompt has 3 tokens"]),
        (["stages.rollout.sampling.stop_token_ids=[24]"], "stages.rollout.sampling.stop_token_ids", ["24"]),
        (["stages.rollout.samples_per_prompt=1"], "stages.rollout.samples_per_prompt", ["at least 2"]),
        (["stages.train.updates_per_step=3"], "stages.train.updates_per_step", ["prompts_per_step = 4"]),
        (["stages.train.loss.kl.coefficient=0.1"], "stages.train.loss.kl.coefficient", ["kl.reference"]),
        (["stages.train.loss.kl.reference=initial"], "stages.train.loss.kl.reference", ["kl.coefficient"]),
        (["stages.train.optimizer.warmup_updates=2", "stages.train.optimizer.schedule=linear"],
         "stages.train.optimizer.warmup_updates", ["updates, 2", "'linear'"]),
        (["stages.evaluate.every=1", "stages.evaluate.prompts=0"], "stages.evaluate.every", ["evaluate.prompts"]),
        (["stages.evaluate.samples_per_prompt=2"], "stages.evaluate.samples_per_prompt", ["greedy"]),
        (["data.source=complement_digit"], "data.source", ["complement_digits"]),
        (["data.parameters.digit=2"], "data.parameters.digit", ["digits"]),
        (["data.parameters.digits=9"], "data.parameters", ["digits = 9"]),
        (["data.parameters.held_out=3"], "stages.evaluate.prompts", ["5", "3"]),
        (["steps=30"], "data.repeat", ["120", "90"]),
        (["data.train_prompts=91"], "data.train_prompts", ["91", "90"]),
        (["stages.reward.function=math.nothing"], "stages.reward.function", ["nothing"]),
        (["stages.filter.function=nowhere.keep"], "stages.filter.function", ["nowhere"]),
        (["stages.filter.parameters={a: 1}"], "stages.filter.parameters", ["filter.function"]),
    ],
)  # fmt: skip
def test_a_problem_is_named(overrides: list[str], key: str, words: list[str]) -> None:
    problems = found(*overrides)
    assert any(at == key and all(word in sentence for word in words) for at, sentence in problems), problems


def test_a_short_run_may_end_while_its_learning_rate_rises() -> None:
    prepared = prepare(loaded("steps=1", "stages.train.optimizer.warmup_updates=2"))
    assert prepared.pipeline.stages.train.optimizer.warmup_updates == 2
    assert optimizer_config(prepared.pipeline).schedule.learning_rate(0) == 0.5 * 1e-3


def test_all_problems_come_at_once() -> None:
    keys = {key for key, _ in found("steps=30", "placement=split", "model.preset=tiny", "stages.reward.function=a.b")}
    assert keys == {"stages.sync.transport", "model.preset", "stages.reward.function", "data.repeat"}
    keys = {
        key for key, _ in found("steps=30", "placement=split", "contract.topology.tp=4", "stages.reward.function=a.b")
    }
    assert keys == {"stages.sync.transport", "contract.topology.tp", "stages.reward.function", "data.repeat"}


def test_rows_repeat_when_declared() -> None:
    assert not found("steps=30", "data.repeat=true")


def test_an_occupied_run_directory_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    assert not found(directory=tmp_path)
    (tmp_path / "timeline.jsonl").write_text("")
    ((key, sentence),) = found(directory=tmp_path)
    assert key == "run_directory"
    assert "vime resume" in sentence
    assert "--fresh" in sentence
    assert not problems_of(lambda: prepare(loaded(directory=tmp_path), new_run=False))


def test_a_file_in_place_of_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    assert found(directory=tmp_path / "x")[0][0] == "run_directory"


def test_not_enough_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.pipeline.machine.estimated_bytes", lambda pipeline, config: 10**18)
    ((key, sentence),) = found()
    assert key == "run_directory"
    assert "free" in sentence


def test_held_out_prompts_that_are_training_prompts(tmp_path: Path) -> None:
    rows = "".join(f'{{"text": "{n}="}}\n' for n in range(20))
    (tmp_path / "a.jsonl").write_text(rows)
    overrides = [
        "data.source=jsonl",
        f"data.parameters={{train: '{tmp_path}/a.jsonl', eval: '{tmp_path}/a.jsonl'}}",
    ]
    ((key, sentence),) = found(*overrides, "steps=5")
    assert key == "data.source"
    assert "held-out" in sentence


def jsonl(tmp_path: Path, train: str, held_out: str = "") -> list[str]:
    """Overrides for a data set of files."""
    (tmp_path / "a.jsonl").write_text(train)
    (tmp_path / "b.jsonl").write_text(held_out)
    names = f"train: '{tmp_path}/a.jsonl'" + (f", eval: '{tmp_path}/b.jsonl'" if held_out else "")
    prompts = "1" if held_out else "0"
    return [f"data={{source: jsonl, parameters: {{{names}}}}}", f"stages.evaluate.prompts={prompts}", "steps=1"]


def test_an_overlap_is_found_in_rows_that_this_run_never_draws(tmp_path: Path) -> None:
    train = "\n".join(f'{{"text": "{n}="}}' for n in range(1000))
    held_out = '{"text": "7-"}\n\n{"text": "421="}\n'  # a blank line between, as people leave them
    ((key, sentence),) = found(*jsonl(tmp_path, train, held_out))
    assert key == "data.source" and "1 of the held-out prompts" in sentence
    assert f"{tmp_path}/b.jsonl:3 and {tmp_path}/a.jsonl:422" in sentence
    assert not found(*jsonl(tmp_path, train, held_out.replace("421=", "421-")))
    assert not found(*jsonl(tmp_path, train, held_out), "data.train_prompts=421")  # those are never drawn


def test_an_overlap_of_chats_is_found_whatever_else_the_rows_say(tmp_path: Path) -> None:
    def chat(answer: int) -> str:
        return f'{{"messages": [{{"role": "user", "content": "1+1="}}], "answer": {answer}}}\n'

    sentences = [sentence for _, sentence in found(*jsonl(tmp_path, chat(2), chat(3)))]
    assert any("a.jsonl:1" in sentence and "b.jsonl:1" in sentence for sentence in sentences)


def test_a_bad_row_is_named_by_file_and_line_drawn_or_not(tmp_path: Path) -> None:
    train = "".join(f'{{"text": "{n}="}}\n' for n in range(400)) + '\n{"txt": "1="}\n{"text": 5}\n'
    problems = found(*jsonl(tmp_path, train))
    assert [key for key, _ in problems] == ["data.source"] * 2
    assert f"{tmp_path}/a.jsonl:402: a row has 'text' or 'messages', and this one has neither" in problems[0][1]
    assert f"{tmp_path}/a.jsonl:403: 'text' is a string, not 5" in problems[1][1]
    many = '{"txt": "1="}\n' * 50
    assert len(found(*jsonl(tmp_path, many))) < 6


def test_an_empty_data_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    problems = found(
        "data.source=jsonl", f"data.parameters={{train: '{tmp_path}/a.jsonl'}}", "stages.evaluate.prompts=0"
    )
    assert problems[0][0] == "data.source"
    assert "no train rows" in problems[0][1]


def test_a_character_outside_the_alphabet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1="}\n{"text": "ä"}\n')
    overrides = ["data.source=jsonl", f"data.parameters={{train: '{tmp_path}/a.jsonl'}}", "stages.evaluate.prompts=0"]
    problems = found(*overrides, "steps=1", "stages.rollout.prompts_per_step=2")
    assert any("a.jsonl:2:" in sentence and "ä" in sentence for _, sentence in problems), problems
