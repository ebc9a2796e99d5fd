"""Data sources, rewards, the permutation and prompt sets."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkernel.models.tokenizer import character_tokenizer
from vime.errors import InputError
from vime.tasks import arithmetic, digits, jsonl
from vime.tasks.permutation import permutation
from vime.tasks.prompts import PromptSet
from vime.types import GeneratedSample, Prompt, SampleId

SAMPLE = GeneratedSample(
    SampleId("train", 0, 0), (1,), (), np.zeros(0, np.float32), np.zeros((0, 2), np.uint64), np.zeros(0, np.float32),
    np.zeros(0), (), "stop", "engine",
)  # fmt: skip


def prompt(**row: Any) -> Prompt:
    return Prompt("train", 0, (1,), "", row)


@given(st.integers(0, 300), st.text(max_size=5))
def test_a_permutation_is_one(count: int, label: str) -> None:
    assert sorted(permutation(count, label)) == list(range(count))


def test_the_permutation_is_pinned_and_follows_its_label() -> None:
    assert permutation(10, "a") == permutation(10, "a") != permutation(10, "b")
    text = ",".join(map(str, permutation(1000, "pinned")))
    assert hashlib.sha256(text.encode()).hexdigest() == PINNED


def test_permutations_are_uniform() -> None:
    counts = {p: 0 for p in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]}
    for i in range(1200):
        counts[permutation(3, str(i))] += 1
    # 1,200 draws over 6: standard deviation 12.9; the draws are fixed, so this cannot fail by chance
    assert all(abs(count - 200) < 52 for count in counts.values()), counts


def test_digit_tasks_split_all_numbers() -> None:
    for rows in (digits.complement_rows, digits.reverse_rows):
        train = {row["text"] for row in rows("train", digits=3, held_out=50)}
        held = {row["text"] for row in rows("eval", digits=3, held_out=50)}
        assert (len(train), len(held), len(train | held)) == (950, 50, 1000)
    by_text = {row["text"]: row["answer"] for row in digits.complement_rows("train")}
    assert by_text["3816="] == "6183"
    assert {row["text"]: row["answer"] for row in digits.reverse_rows("train")}["3817="] == "7183"
    for wrong in ({"digits": 0}, {"digits": 7}, {"held_out": 10_000}):
        with pytest.raises(InputError):
            digits.complement_rows("train", **wrong)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("6183", 1.0), ("618", 0.75), ("61837", 0.8), ("", 0.0), ("0000", 0.0), ("6000", 0.25), ("16183", 0.0)],
)
def test_digit_reward(text: str, reward: float) -> None:
    assert digits.reward(prompt(answer="6183"), SAMPLE, text) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so 3 + 4 = 7", "7", 1.0),
        ("The answer is -12.", "-12", 1.0),
        ("7 and then 8", "7", 0.1),
        ("1,234", "1234", 1.0),
        ("3.50", "3.5", 1.0),
        ("-0", "0", 1.0),
        ("seven", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_arithmetic_reward(text: str, answer: str, reward: float) -> None:
    assert arithmetic.reward(prompt(answer=answer), SAMPLE, text) == reward


def test_arithmetic_rows_are_distinct_and_held_out() -> None:
    pytest.importorskip("reasoning_gym")
    settings = {"size": 40, "held_out": 20, "options": {"max_terms": 2, "max_digits": 2}}
    train, held = (arithmetic.rows(name, **settings) for name in ("train", "eval"))  # type: ignore[arg-type]
    questions = [row["messages"][0]["content"] for row in (*train, *held)]
    assert len(questions) == len(set(questions)) == 60
    assert train == arithmetic.rows("train", **settings)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="distinct"):
        arithmetic.rows("train", size=10_000, options={"max_terms": 2, "max_digits": 1})
    with pytest.raises(InputError, match="no_such"):
        arithmetic.rows("train", dataset="no_such")


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "1"}\n\n{"text": "2", "answer": 4}\n')
    assert [row["text"] for row in jsonl.rows("train", train=str(file))] == ["1", "2"]
    assert jsonl.rows("eval", train=str(file)) == []
    file.write_text('{"text": "1"}\n{"text"\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2"):
        jsonl.rows("train", train=str(file))
    file.write_text('{"text": "1"}\n{"text"\n\n[1]\n{"text": "2"}\nfour\n')
    with pytest.raises(InputError) as caught:
        jsonl.rows("train", train=str(file))
    assert [f"a.jsonl:{line}: " in str(caught.value) for line in range(1, 7)] == [False, True, False, True, False, True]
    file.write_text("no\n" * 25)
    with pytest.raises(InputError, match=r"a\.jsonl:10: [^:]*; and 15 more lines$"):
        jsonl.rows("train", train=str(file))
    file.write_text("[1]\n")
    with pytest.raises(InputError, match=r"a\.jsonl:1"):
        jsonl.rows("train", train=str(file))
    file.write_text('{"text": "a\u2028b"}\n\n{"text": "2"}', encoding="utf-8")  # U+2028 ends no line of JSON Lines
    read = jsonl.rows("train", train=str(file))
    assert [row["text"] for row in read] == ["a\u2028b", "2"]
    assert isinstance(read, jsonl.JsonRows) and read.place(1) == f"{file}:3" and read[1:].place(0) == f"{file}:3"  # type: ignore[attr-defined]
    for damaged in ("[" * 100_000, '{"text": ' + "9" * 5000 + "}"):
        file.write_text(damaged)
        with pytest.raises(InputError, match=r"a\.jsonl:1"):
            jsonl.rows("train", train=str(file))
    for name in ("a\0b", "x" * 300):
        with pytest.raises(InputError, match="cannot be read"):
            jsonl.rows("train", train=name)
    with pytest.raises(InputError, match="no data file"):
        jsonl.rows("train", train=str(tmp_path / "nowhere"))
    assert jsonl.exact_match(prompt(answer=4), SAMPLE, " 4\n") == 1.0
    with pytest.raises(InputError, match="no field"):
        jsonl.exact_match(prompt(), SAMPLE, "4")


ROWS = [{"text": f"{n}="} for n in range(10)]


def test_prompt_index_is_a_place_in_the_seeded_permutation() -> None:
    tokenizer = character_tokenizer()
    prompts = PromptSet("train", ROWS, tokenizer, 1, repeat=True)
    first, second = ([prompts.prompt(i).text for i in range(a, a + 10)] for a in (0, 10))
    assert sorted(first) == sorted(second) == sorted(row["text"] for row in ROWS)
    assert first != second
    assert [p.text for p in PromptSet("train", ROWS, tokenizer, 1).take(3, 2)] == first[3:5]
    assert [p.text for p in PromptSet("train", ROWS, tokenizer, 2).take(0, 10)] != first
    assert [p.text for p in PromptSet("eval", ROWS, tokenizer, 1).take(0, 10)] != first
    assert prompts.prompt(13).prompt_index == 13
    with pytest.raises(InputError, match=r"data\.repeat"):
        PromptSet("train", ROWS, tokenizer, 1).prompt(10)


@pytest.mark.parametrize(
    "row",
    [
        {}, {"text": "1", "messages": []}, {"text": 3}, {"text": ""}, {"text": "ä"}, {"messages": "x"},
        {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": "1"}]},
    ],
)  # fmt: skip
def test_rows_that_cannot_be_rendered_are_named(row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="row 0"):
        PromptSet("train", [row], character_tokenizer(), 1).prompt(0)


def test_no_rows() -> None:
    with pytest.raises(InputError, match="no eval rows"):
        PromptSet("eval", [], character_tokenizer(), 1)


PINNED = "bd5b1e56995042d999e51f280a211ce67c68b1594ca3c3fd77713534b5b170bd"


def test_rows_of_wrong_form_are_named_beside_lines_that_are_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "1"}\n{"text": 5}\nno JSON\n[1]\n')
    with pytest.raises(InputError) as caught:
        jsonl.rows("train", train=str(file))
    assert [f"a.jsonl:{line}: " in str(caught.value) for line in range(1, 5)] == [False, True, True, True]
