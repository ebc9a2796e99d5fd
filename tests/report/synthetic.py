"""Synthetic runs for the report's tests."""

from __future__ import annotations

import math
from typing import Any


def step(number: int, **changes: Any) -> dict[str, Any]:
    progress = 1 / (1 + math.exp(-(number - 14) / 3))
    wobble = math.sin(number * 1.7) * 0.03
    values: dict[str, Any] = {
        "step": number,
        "weight_version": number,
        "num_samples": 64,
        "num_tokens": 320 + number % 5,
        "compared_tokens": 320 + number % 5,
        "incomparable_tokens": {},
        "mismatch_count": 0,
        "max_abs_diff": 0.0,
        "mean_abs_diff": 0.0,
        "nonfinite_count": 0,
        "distribution_mismatch_count": 0,
        "worst_token": None,
        "k1": 0.0,
        "k2": 0.0,
        "k3": 0.0,
        "ratio_min": 1.0,
        "ratio_max": 1.0,
        "clip_fraction": 0.0,
        "entropy": 2.3 * (1 - progress) + 0.1,
        "reward_mean": 0.05 + 0.9 * progress + wobble,
        "reward_std": 0.3 - 0.2 * progress,
        "zero_variance_groups": int(progress * 6),
        "response_length_mean": 5.0 + wobble,
        "truncated_fraction": 0.1 * (1 - progress),
        "loss": -0.01 * (1 - progress) + wobble / 50,
        "grad_norm": 0.6 + 0.4 * math.cos(number / 2) * (1 - progress),
        "learning_rate": 3e-3 * min(1.0, (number + 1) / 4),
        "tokens_per_s": 4100 + 300 * wobble * 10,
        "peak_memory_bytes": 612 * 2**20,
        "time_s": {"rollout": 0.08, "reward": 0.004, "score": 0.03, "train": 0.11 + wobble / 3, "sync": 0.01,
                   "total": 0.25 + wobble / 3},
    }  # fmt: skip
    return {**values, **changes}


def data(**changes: Any) -> dict[str, Any]:
    """Arguments of ``RunSummary.from_data`` for a run of 34 clean steps."""
    digests = {"semantic": "3f" * 32, "numerical_policy": "a7" * 32}
    calls = [
        {"region": region, "case": case, "implementation": f"cpu.{region}", "count": 680, "tokens": 21_760}
        for case in ("trainer_score", "trainer_forward", "trainer_backward")
        for region in ("rms_norm", "qkv_proj", "attention", "logprob")
    ]
    values: dict[str, Any] = {
        "name": "quickstart",
        "steps": [step(n) for n in range(34)],
        "evaluations": [
            {"step": 0, "reward_mean": 0.06, "num_samples": 128},
            {"step": 17, "reward_mean": 0.71, "num_samples": 128},
            {"step": 34, "reward_mean": 0.94, "num_samples": 128},
        ],
        "identities": {
            "trainer": {**digests, "deployment": "11" * 32},
            "engine-0": {**digests, "deployment": "22" * 32},
        },
        "contract": {
            "semantic": {"model": {"family": "qwen3", "num_layers": 2, "hidden_size": 64, "vocab_size": 32}},
            "numerical_policy": {
                "profile": "portable",
                "dtype": "float32",
                "topology": {"tp": 1, "dp": 1},
                "entries": {"trainer_score/rms_norm": {}, "rollout_decode/attention": {}},
            },
        },
        "evidence": {"trainer": {"calls": calls, "facts": {"workers": 2}, "refused": []}},
        "facts": {"model": "qwen3, 2 layers of width 64", "seed": "0", "steps": "34"},
    }
    return {**values, **changes}
