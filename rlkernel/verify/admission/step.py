"""Problems and executions of the optimizer step: gradient norm with clipping, AdamW, and the policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from rlkernel.contract.build import Contract
from rlkernel.kernels.cpu import optimizer
from rlkernel.kernels.cpu.optimizer import AdamWScalars
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.reference import loss as reference_loss
from rlkernel.reference import optimizer as reference
from rlkernel.verify.admission import double_rounding
from rlkernel.verify.admission.bits import Results
from rlkernel.verify.admission.values import FINITE_HAZARDS, HAZARDS, generator, hazard_rows, make

STEP_REGIONS = ("gradient_norm", "adamw", "loss")


@dataclass(frozen=True)
class StepProblem:
    """Arguments of one computation of the optimizer step, by name."""

    shape_class: str
    name: str
    hazards: tuple[str, ...]
    arguments: Mapping[str, Any]

    def hazard(self, index: tuple[int, ...]) -> str:
        """The class of values at an index of an output."""
        if len(self.hazards) == 1:
            return self.hazards[0]
        return self.hazards[index[0]] if index and index[0] < len(self.hazards) else "mixed"


class StepOp(Protocol):
    """An implementation of a computation of the optimizer step; arguments must not be changed."""

    implementation: str

    def run(self, arguments: Mapping[str, Any], workers: Workers, bf16: bool) -> Results: ...


class CpuGradientNorm:
    """Norm over all tensors, and the factor of clipping."""

    implementation = "cpu.gradient_norm"

    def __init__(self, kernels: Any = optimizer) -> None:
        self._kernels = kernels

    def run(self, arguments: Mapping[str, Any], workers: Workers, bf16: bool) -> Results:
        norm = self._kernels.gradient_norm(arguments["gradients"], workers)
        clip = self._kernels.clip_factor(norm, arguments["max_norm"])
        return {"norm": np.array([norm], np.float32), "clip": np.array([clip], np.float32)}


class CpuAdamW:
    """One update of a tensor."""

    implementation = "cpu.adamw"

    def __init__(self, kernels: Any = optimizer) -> None:
        self._kernels = kernels

    def run(self, arguments: Mapping[str, Any], workers: Workers, bf16: bool) -> Results:
        master, m, v = (arguments[name].copy() for name in ("master", "m", "v"))
        weight = self._kernels.adamw(master, m, v, arguments["gradient"], arguments["scalars"], workers, bf16)
        return {"master": master, "m": m, "v": v, "weight": weight}


class ReferenceStep:
    """The interpreter of a computation of the optimizer step."""

    implementation = "reference"

    def __init__(self, contract: Contract, kind: str, norm: Any = reference, losses: Any = reference_loss) -> None:
        self._points = contract.entries[("optimizer_step", kind)]
        self._kind, self._norm, self._losses = kind, norm, losses

    def run(self, arguments: Mapping[str, Any], workers: Workers, bf16: bool) -> Results:
        if self._kind == "gradient_norm":
            gradients = {name: torch.from_numpy(value) for name, value in arguments["gradients"].items()}
            norm = self._norm.gradient_norm(self._points, gradients)
            clip = self._norm.clip_factor(norm, arguments["max_norm"])
            return {"norm": norm.reshape(1).numpy(), "clip": clip.reshape(1).numpy()}
        if self._kind == "adamw":
            given = [torch.from_numpy(arguments[name]) for name in ("master", "m", "v", "gradient")]
            found = self._norm.adamw(self._points, *given, arguments["scalars"])
            return {name: t.numpy() for name, t in zip(("master", "m", "v", "weight"), found, strict=True)}
        names = [item.name for item in fields(reference_loss.LossInputs)]
        inputs = reference_loss.LossInputs(**{name: torch.from_numpy(arguments[name]) for name in names})
        losses = self._losses.token_losses(self._points, arguments["constants"], inputs)
        return {
            name: value.numpy().view(np.uint8) if value.dtype == torch.bool else value.numpy()
            for name, value in losses.items()
        }


def _norm_problems(seed: int) -> list[StepProblem]:
    rng = generator(seed, "gradient_norm")
    shapes: list[tuple[str, dict[str, tuple[int, ...]]]] = [
        ("few rows", {"b.weight": (3, 5), "a.weight": (7,), "a.Weight": (2,)}),
        ("a leaf of one tile", {"w": (1024,)}),
        ("K not a multiple of the tile", {"w": (1025,), "v": (5 * 1024 + 300,), "u": (33, 100)}),
        ("many rows", {f"layer.{i}.w": (40, 130) for i in range(11)}),
        ("zero rows", {"empty": (0,), "one": (1,)}),
    ]
    problems = []
    for draw in range(6):  # one number comes of a problem: several draws, so that a rare difference shows
        for shape_class, sizes in shapes:
            gradients = {name: make("normal", rng, shape, False) for name, shape in sizes.items()}
            label = ", ".join(f"{name}{list(shape)}" for name, shape in sizes.items())
            arguments = {"gradients": gradients, "max_norm": 1e9 if draw == 1 else 1.0}
            problems.append(StepProblem(shape_class, label, ("normal",), arguments))
    for draw in range(8):
        rows = double_rounding.norm_rows(generator(seed, "gradient_norm", "ties", draw), 1, 600, 256)
        arguments = {"gradients": {"w": rows[0]}, "max_norm": 1.0}
        problems.append(StepProblem("few rows", f"600, draw {draw}", (double_rounding.HAZARD,), arguments))
    for hazard in HAZARDS:
        gradients = {"w": make(hazard, rng, (1100,), False), "b": make("normal", rng, (3,), False)}
        problems.append(StepProblem("few rows", "1,100 and 3", (hazard,), {"gradients": gradients, "max_norm": 1.0}))
    return problems


def scalars(rng: np.random.Generator, step: int, clip: float) -> AdamWScalars:
    """Scalars of an update, its learning rate drawn."""
    beta1, beta2 = 0.9, 0.95
    values = {
        "lr": 10.0 ** -rng.integers(2, 5), "beta1": beta1, "beta2": beta2,
        "one_minus_beta1": 1.0 - beta1, "one_minus_beta2": 1.0 - beta2,
        "correction1": 1.0 / (1.0 - beta1**step), "correction2": 1.0 / (1.0 - beta2**step),
        "eps": 1e-8, "weight_decay": 0.1 * (step % 2), "clip": clip,
    }  # fmt: skip
    return AdamWScalars(**{name: np.float32(value) for name, value in values.items()})


def _adamw_ties(rng: np.random.Generator, given: AdamWScalars) -> StepProblem:
    """Row 0: new m beside ties; row 1: new v; row 2: normal."""
    scalars, count, width = replace(given, clip=np.float32(1.0)), 256, 48
    master, m, v, gradient = (make("normal", rng, (3, width), False) for _ in range(4))
    v = np.abs(v)
    for row, (beta, rest, old) in enumerate(
        ((scalars.beta1, scalars.one_minus_beta1, m), (scalars.beta2, scalars.one_minus_beta2, v))
    ):
        values, missing = double_rounding.near_ties(rng, beta, count)
        wanted = missing / float(rest)
        g = (wanted if row == 0 else np.sqrt(wanted)).astype(np.float32)
        g *= np.float32(1.0) + rng.integers(-2, 3, len(g)).astype(np.float32) * np.float32(2.0**-23)
        hit = double_rounding.beside(beta, values, missing, rest * (g if row == 0 else g * g))
        found = np.flatnonzero(hit)[:width]
        sign = np.where(np.arange(len(found)) % 2 == 0, np.float32(1.0), np.float32(-1.0 if row == 0 else 1.0))
        old[row, : len(found)], gradient[row, : len(found)] = values[found] * sign, g[found] * sign
    arguments = {"master": master, "m": m, "v": v, "gradient": gradient, "scalars": scalars}
    labels = (double_rounding.HAZARD, double_rounding.HAZARD, "normal")
    return StepProblem("many rows", f"3 x {width}, beside ties", labels, arguments)


def _adamw_problems(seed: int) -> list[StepProblem]:
    rng = generator(seed, "adamw")
    problems = []
    for step, width, clip in ((1, 40, 0.37), (2, 1, 1.0), (7, 300, 0.0625)):
        master, labels = hazard_rows(FINITE_HAZARDS, 3, (width,), rng, False)
        gradient, _ = hazard_rows(FINITE_HAZARDS, 3, (width,), rng, False)
        m, v = make("normal", rng, master.shape, False), np.abs(make("normal", rng, master.shape, False))
        m[:4], v[:4] = 0.0, 0.0
        arguments = {
            "master": master, "m": m, "v": v, "gradient": np.ascontiguousarray(np.roll(gradient, 1, 0)),
            "scalars": scalars(rng, step, clip),
        }  # fmt: skip
        problems.append(StepProblem("many rows", f"{master.shape[0]} x {width}, update {step}", labels, arguments))
    problems.append(_adamw_ties(generator(seed, "adamw", "ties"), problems[0].arguments["scalars"]))
    empty = {**problems[0].arguments, **{n: np.zeros((0,), np.float32) for n in ("master", "m", "v", "gradient")}}
    return [*problems, StepProblem("zero rows", "0", ("normal",), empty)]


def _loss_problems(seed: int) -> list[StepProblem]:
    rng = generator(seed, "loss")
    tokens, problems = 400, []
    for policy in reference_loss.POLICIES:
        for kl in reference_loss.KL_TERMS:
            new = -np.abs(make("large", rng, (tokens,), False)) / np.float32(16)
            old = new + make("normal", rng, (tokens,), False) * np.float32(0.3)
            old[: tokens // 4] = new[: tokens // 4]
            arguments: dict[str, Any] = {
                "new": new, "old": old, "reference": new + make("normal", rng, (tokens,), False),
                "advantage": make("normal", rng, (tokens,), False), "trained": rng.random(tokens) < 0.8,
                "weight": np.full(tokens, 1.0 / 317, np.float32),
                "constants": reference_loss.LossConstants(
                    policy, kl, float(np.float32(0.8)), float(np.float32(1.28)),
                    0.0 if kl == "none" else float(np.float32(0.04)),
                ),
            }  # fmt: skip
            arguments["advantage"][::17] = 0.0
            problems.append(StepProblem("many rows", f"{policy}, KL {kl}, {tokens} tokens", ("normal",), arguments))
    first = problems[0].arguments
    empty = {n: x[:0] if isinstance(x, np.ndarray) else x for n, x in first.items()}
    return [*problems, StepProblem("zero rows", "0 tokens", ("normal",), empty)]


def step_problems(kind: str, seed: int) -> list[StepProblem]:
    """Problems of ``gradient_norm``, ``adamw`` or ``loss``."""
    makers = {"gradient_norm": _norm_problems, "adamw": _adamw_problems, "loss": _loss_problems}
    return makers[kind](seed)
