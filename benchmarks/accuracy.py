"""Accuracy of the portable profile on a real checkpoint: logits against transformers' and against float64.

Run as ``python -m benchmarks.accuracy models/smollm2-135m``. The reference is transformers' model in float64 over the
same weights, with the parts that transformers always computes in float32 (RMSNorm, the rotary angles) widened too.
For both dtypes the checkpoint that transformers loads is one that vime wrote. Exit code 1 if a threshold is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, machine, write_result
from benchmarks.models import build_runner, logits_of, sequences_batch, transformers_model
from rlkernel.errors import ModelError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.loading import load_model
from rlkernel.models.saving import save_model
from rlkernel.models.tokenizer import Tokenizer, load_tokenizer

FLOAT32_TOLERANCE = 1e-4  # of the largest |logit|
BF16_FACTOR = 1.1  # our rms error over transformers', all texts together
ALL = "all"
_SHOWN = {True: "yes", False: "NO", None: "reported"}

Float64 = np.ndarray[Any, np.dtype[np.float64]]

PROSE = """\
The lighthouse keeper had counted ships for thirty years, and in all that time no two evenings had been alike. In
spring the fishing boats came home early, their lamps low on the water; in autumn the long grain barges waited for the
tide beyond the sand bar and left before anyone in the village was awake. He wrote their names in a ledger with a brown
leather cover. When the ledger was full he put it on the shelf above the stove, took down an empty one, and began
again with the date, the direction of the wind, and the height of the barometer. Nobody had ever asked to read what he
had written. That was not the reason for writing it. A thing that is counted carefully, he used to tell the children
who climbed the stairs on Sundays, is a thing that somebody has looked at.

Iron rusts because it gives up electrons to oxygen where water is present. The oxide that forms takes more room than
the metal did, so it cracks and falls away, and fresh metal is laid bare. Aluminium reacts even more readily, but its
oxide clings to the surface as a thin dense skin, and the reaction stops after a few millionths of a millimetre. This
is why a bridge has to be painted and a window frame does not. Zinc is used as a coating on steel for another reason:
it is the less noble of the two, so that it corrodes first, and the steel beneath a scratch stays whole until the zinc
around it has been used up.
"""
CODE = """\
def interval_union(intervals):
    \"\"\"Merge overlapping (start, end) pairs.\"\"\"
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


assert interval_union([(5, 8), (1, 3), (2, 4)]) == [(1, 4), (5, 8)]
print(17 * 23, 2**10 - 1, 355 / 113)
"""
CHAT = (
    {"role": "system", "content": "You are a careful assistant. Show each step of a calculation."},
    {"role": "user", "content": "A train leaves at 9:40 and travels 84 km at 56 km/h. When does it arrive?"},
    {
        "role": "assistant",
        "content": "Time is distance over speed: 84 / 56 = 1.5 hours, which is 1 hour and 30 minutes. "
        "9:40 plus 1:30 is 11:10. The train arrives at 11:10.",
    },
    {"role": "user", "content": "And if it stops twice on the way, 7 minutes each time?"},
    {"role": "assistant", "content": "Two stops of 7 minutes add 14 minutes. 11:10 plus 0:14 is 11:24."},
    {"role": "user", "content": "Thank you. What is 12 + 47 - 9?"},
)


def texts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Token ids of what is evaluated."""
    return {"prose": tokenizer.encode(PROSE), "code": tokenizer.encode(CODE), "chat": tokenizer.chat(list(CHAT))}


class _WideNorm(torch.nn.Module):
    """RMSNorm that computes in the dtype of its input (transformers' own goes through float32)."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class _WideRotary(torch.nn.Module):
    """Rotary cos and sin of the default variant in float64."""

    def __init__(self, theta: float, head_dim: int) -> None:
        super().__init__()
        self.frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def float64_model(folder: Path, theta: float, head_dim: int) -> Any:
    """transformers' model with every operation in float64."""
    model = transformers_model(folder, torch.float64)
    model.model.rotary_emb = _WideRotary(theta, head_dim)
    model.model.norm = _WideNorm(model.model.norm)
    for layer in model.model.layers:
        layer.input_layernorm = _WideNorm(layer.input_layernorm)
        layer.post_attention_layernorm = _WideNorm(layer.post_attention_layernorm)
    return model


def peer_logits(model: Any, ids: list[int]) -> Float64:
    """Logits [N, V] of one sequence, widened exactly to float64."""
    with torch.no_grad():
        found: Float64 = model(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()
    return found


def _rms(values: Float64) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _next_token_logprobs(logits: Float64, ids: list[int]) -> Float64:
    rows = logits[:-1]
    top = rows.max(axis=1)
    normaliser = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
    found: Float64 = rows[np.arange(len(rows)), ids[1:]] - normaliser
    return found


@dataclass(frozen=True)
class Accuracy:
    """Errors of one text in one dtype. ``rms_*``: logits against float64; ``logprob_*``: next-token ones, nats."""

    dtype: str
    text: str
    tokens: int
    largest_logit: float
    difference: float  # largest |ours - transformers'| over the largest |logit|
    rms_ours: float
    rms_transformers: float
    logprob_ours: float  # mean |error|
    logprob_transformers: float
    same_top_ours: float  # fraction of tokens whose largest logit is float64's
    same_top_transformers: float

    @property
    def rms_ratio(self) -> float:
        return self.rms_ours / self.rms_transformers

    @property
    def verdict(self) -> bool | None:
        """Whether the threshold that decides on this row is kept; None for a row that is reported only.

        float32: the largest difference, of every text. bfloat16: the ratio of the rms errors over all texts together:
        rounding errors of a single short text are a small sample, and transformers' own depend on the CPU's kernels.
        """
        if self.dtype == "float32":
            return None if self.text == ALL else self.difference <= FLOAT32_TOLERANCE
        return self.rms_ratio <= BF16_FACTOR if self.text == ALL else None

    def line(self) -> str:
        return (
            f"{self.dtype:9} {self.text:6} {self.tokens:4} tokens  |logit| <= {self.largest_logit:5.1f}   ours against "
            f"transformers {self.difference:.1e}   rms error: ours {self.rms_ours:.3e}, transformers "
            f"{self.rms_transformers:.3e}, ratio {self.rms_ratio:.3f}   {_SHOWN[self.verdict]}"
        )

    def as_json(self) -> dict[str, Any]:
        numbers = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in vars(self).items()}
        return {**numbers, "rms_ratio": round(self.rms_ratio, 4), "accepted": self.verdict}


def together(rows: Sequence[Accuracy]) -> Accuracy:
    """All texts of one dtype as one: rms over all tokens, means weighted by tokens, the largest difference."""
    count = sum(row.tokens for row in rows)

    def mean(name: str) -> float:
        return sum(row.tokens * float(getattr(row, name)) for row in rows) / count

    def root(name: str) -> float:
        return math.sqrt(sum(row.tokens * float(getattr(row, name)) ** 2 for row in rows) / count)

    means = ("logprob_ours", "logprob_transformers", "same_top_ours", "same_top_transformers")
    return Accuracy(
        dtype=rows[0].dtype,
        text=ALL,
        tokens=count,
        largest_logit=max(row.largest_logit for row in rows),
        difference=max(row.difference for row in rows),
        rms_ours=root("rms_ours"),
        rms_transformers=root("rms_transformers"),
        **{name: mean(name) for name in means},
    )


def measure(source: Path, dtype: str, threads: int) -> Iterator[Accuracy]:
    """Write the checkpoint in ``dtype``, load it on both sides, and compare every text."""
    workers = Workers(threads)
    model = load_model(source, dtype)  # type: ignore[arg-type]
    if model.config.rope.kind != "default" or model.config.qk_norm:
        raise ModelError(f"{source}: the float64 reference knows the plain rotary embedding and no QK-norm")
    runner = build_runner(model, workers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "written-by-vime"
        save_model(folder, model.config, model.tensors)
        peer = transformers_model(folder, getattr(torch, dtype))
        exact = float64_model(folder, model.config.rope.theta, model.config.head_dim)
    for name, ids in texts(load_tokenizer(source)).items():
        ours = logits_of(runner, sequences_batch(np.array([ids])), workers).astype(np.float64)
        theirs, reference = peer_logits(peer, ids), peer_logits(exact, ids)
        logprobs, top = _next_token_logprobs(reference, ids), reference.argmax(axis=1)
        largest = float(np.abs(reference).max())
        yield Accuracy(
            dtype=dtype,
            text=name,
            tokens=len(ids),
            largest_logit=largest,
            difference=float(np.abs(ours - theirs).max()) / largest,
            rms_ours=_rms(ours - reference),
            rms_transformers=_rms(theirs - reference),
            logprob_ours=float(np.abs(_next_token_logprobs(ours, ids) - logprobs).mean()),
            logprob_transformers=float(np.abs(_next_token_logprobs(theirs, ids) - logprobs).mean()),
            same_top_ours=float((ours.argmax(axis=1) == top).mean()),
            same_top_transformers=float((theirs.argmax(axis=1) == top).mean()),
        )
    workers.close()


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder, as `vime model fetch smollm2-135m` writes it")
    parser.add_argument("--json", type=Path, default=RESULTS / "accuracy.json", help="where the result is written")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = []
    for dtype in ("float32", "bfloat16"):
        own = []
        for accuracy in measure(options.model, dtype, options.threads):
            print(accuracy.line(), flush=True)
            own.append(accuracy)
        print(together(own).line(), flush=True)
        rows += [*own, together(own)]
    accepted = all(row.verdict is not False for row in rows)
    print("every threshold is reached" if accepted else "NOT every threshold is reached")
    result = {
        "machine": machine(options.threads),
        "model": options.model.name,
        "threshold_float32_difference": FLOAT32_TOLERANCE,
        "threshold_bfloat16_rms_ratio": BF16_FACTOR,
        "accepted": accepted,
        "rows": [row.as_json() for row in rows],
    }
    write_result(options.json, result)
    return 0 if accepted else 1


if __name__ == "__main__":
    sys.exit(main())
