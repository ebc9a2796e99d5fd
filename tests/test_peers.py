"""What the comparison of engines makes of its measured times."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu.decode_peers import KINDS, Worker, measure


class Timed:
    """Answers with the seconds of a rate, more in later rounds; keeps what it was asked."""

    def __init__(self, tokens_per_s: float) -> None:
        self.rate, self.asked = tokens_per_s, []  # type: ignore[var-annotated]

    def seconds(self, question: dict[str, Any]) -> float:
        self.asked.append(question)
        slower = 1 + 0.5 * (len(self.asked) > 2)
        return 0.25 + slower * question["sequences"] * (question["tokens"] - 1) / self.rate


def test_rates_leave_the_first_round_out_and_ratios_are_of_medians() -> None:
    workers: Any = {"vime": Timed(400.0), "vllm": Timed(200.0)}
    given = argparse.Namespace(rounds=3, sequences=[4], arms=["vime", "vllm", "vllm-logprobs"], tokens=11)
    prepared: Any = SimpleNamespace(longest_prompt=7, config=SimpleNamespace(vocab_size=50))
    (row,) = measure(workers, given, prepared)
    assert len(workers["vime"].asked) == 4 * 2
    assert row["prompt_tokens"] == 7
    assert row["arms"]["vime"]["decode"] == pytest.approx(
        {"median": 400 / 1.5, "least": 400 / 1.5, "largest": 400 / 1.5}
    )
    assert row["arms"]["vime"]["tokens_per_s"]["median"] == pytest.approx(44 / (0.25 + 1.5 * 40 / 400))
    assert row["ratio"]["vllm"]["decode"] == pytest.approx(2.0)
    assert row["ratio"]["vllm-logprobs"]["tokens_per_s"] == pytest.approx((0.25 + 1.5 * 40 / 200) / (0.25 + 0.15))
    assert "vime" not in row["ratio"]
    asked = [question["logprobs"] for question in workers["vllm"].asked]
    assert asked == [False, False, True, True] * 4
    assert len({question["seed"] for worker in workers.values() for question in worker.asked}) == 24


def test_an_engine_that_ends_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"^vllm ended with exit code 7$"):
        Worker("vllm", [sys.executable, "-c", "raise SystemExit(7)"], {})
    assert {kind.worker for kind in KINDS.values()} == {"vime", "vllm", "vllm-batch-invariant"}
