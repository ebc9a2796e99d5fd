"""Numbers that have the right type and are still useless: outside what float32 holds, or what anything can be made of.

The bounds are wide on purpose. Each is where a value stops doing what its key says, and its reason is part of the
message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vime.pipeline.combinations import Found, check_rules
from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.problems import Problem
from vime.pipeline.schema import Pipeline, value_at

DAY = 86_400.0


@dataclass(frozen=True)
class Range:
    """Bounds of one number, both included, and why. ``or_zero``: 0 is possible too, and switches something off."""

    low: float
    high: float
    why: str
    or_zero: bool = False

    def problem(self, value: float) -> str | None:
        """The sentence for a value outside, None for one inside."""
        if self.low <= value <= self.high or (self.or_zero and value == 0):
            return None
        off = "0, or " if self.or_zero else ""
        return f"{value!r} is out of range: {off}{self.low:g} to {self.high:g} is possible. {self.why}"


RANGES = {
    "stages.rollout.sampling.temperature": Range(
        1e-3,
        1e3,
        "Logits are divided by it in float32: below, they leave its range or one token takes everything (evaluation "
        "is greedy as it is); above, every token is about as likely as any other",
    ),
    "stages.rollout.sampling.top_p": Range(1e-6, 1.0, "Less than that keeps the likeliest token alone"),
    "stages.reward.timeout_s": Range(
        1e-3, 7 * DAY, "Shorter than the call itself, every reward would fail; null waits for ever"
    ),
    "stages.advantage.epsilon": Range(
        1e-12, 1e3, "It keeps a division by a standard deviation of rewards finite; much above that, advantages vanish"
    ),
    "stages.train.loss.clip_low": Range(1e-6, 1 - 1e-6, "1 - clip_low has to differ from 1 and from 0 in float32"),
    "stages.train.loss.clip_high": Range(
        1e-6, 1e6, "1 + clip_high has to differ from 1 in float32; no importance ratio gets above 1e6"
    ),
    "stages.train.loss.kl.coefficient": Range(
        1e-12, 1e6, "Outside of that the penalty is lost in float32, or everything else is", or_zero=True
    ),
    "stages.train.optimizer.learning_rate": Range(
        1e-12, 1e2, "AdamW moves a weight by about this much an update: less changes no bit, more leaves no model"
    ),
    "stages.train.optimizer.eps": Range(
        1e-30, 1.0, "It is added to a root of float32 squares: less rounds to nothing there, more drowns every gradient"
    ),
    "stages.train.optimizer.weight_decay": Range(
        1e-12, 1e6, "Outside of that it is lost in float32, or nothing else is left", or_zero=True
    ),
    "stages.train.optimizer.max_grad_norm": Range(
        1e-12, 1e30, "Gradients are scaled to it in float32; 1e30 clips nothing"
    ),
}
BETA = Range(0.0, 1 - 1e-6, "Closer to 1, it rounds to 1 in float32 and the average would never forget")


def _in_range(key: str, allowed: Range) -> Callable[[Pipeline], Found]:
    def rule(pipeline: Pipeline) -> Found:
        value = value_at(pipeline, key)
        message = allowed.problem(value) if isinstance(value, int | float) else None
        if message is not None:
            yield key, message

    return rule


def _betas(pipeline: Pipeline) -> Found:
    for beta in pipeline.stages.train.optimizer.betas:
        message = BETA.problem(beta)
        if message is not None:
            yield "stages.train.optimizer.betas", message


def check_ranges(loaded: LoadedPipeline) -> list[Problem]:
    """Every number that is out of its range."""
    return check_rules(loaded, (*(_in_range(key, allowed) for key, allowed in RANGES.items()), _betas))
