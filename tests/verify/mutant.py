"""What a mutant of the CPU kernels is: one line (or a few) of their source changed, against one of the six points."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD, STEP, DECODE = "trainer_forward", "trainer_backward", "optimizer_step", "rollout_decode"
DEPENDENCY, SPLIT, ORDER = "dependency", "split", "merge order"
PRECISION, ROUNDING, PRIMITIVES = "precision", "rounding", "primitives"
BF16 = "bfloat16"


@dataclass(frozen=True)
class Mutant:
    """``edits`` are (file, old text, new text); the old text stands once in the file."""

    name: str
    point: str
    region: str
    case: str
    edits: tuple[tuple[str, str, str], ...]
    dtype: str = "float32"
    tp: int = 1
    preset: str = "tiny-qwen3"
    head_dim: int = 16


def made(
    name: str,
    point: str,
    region: str,
    case: str,
    *edits: str,
    dtype: str = "float32",
    tp: int = 1,
    preset: str = "tiny-qwen3",
    head_dim: int = 16,
) -> Mutant:
    """Edits as a flat list: file, old, new, file, old, new, ..."""
    triples = tuple((edits[i], edits[i + 1], edits[i + 2]) for i in range(0, len(edits), 3))
    return Mutant(name, point, region, case, triples, dtype, tp, preset, head_dim)
