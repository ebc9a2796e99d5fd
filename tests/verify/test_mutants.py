"""Mutants of the CPU kernels are refused, and the message names the right one of the six points.

A few are compiled here; ``benchmarks/mutants.py`` runs all of them and keeps the result.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import rlkernel.kernels.cpu as cpu
import rlkernel.ops as ops
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.variants import POINTS
from tests.verify.mutants import MUTANTS, refuse
from tests.verify.mutants_wide import WIDE

HERE = (
    "norm: tree pairs halves",
    "norm: rounded before the weight",
    "norm: last element left out of the mean",
    "rope: in float64",
    "rope: positions from the batch",
    "embedding gradient: tokens descending",
    "norm of gradients: leaves of 512",
    "adamw: contracted",
    "adamw: not clipped",
)
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "mutants.json"
WIDE_RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "mutants_wide.json"


def test_there_are_mutants_of_every_point_and_kernel_and_their_edits_fit_the_sources():
    assert len(MUTANTS) >= 60 and len({m.name for m in MUTANTS}) == len(MUTANTS)
    counts = Counter(m.point for m in MUTANTS)
    assert set(counts) == set(POINTS) and min(counts.values()) >= 8
    edited = {file for m in MUTANTS for file, _, _ in m.edits}
    assert edited >= {
        "gemm.py", "gemm_gradient.py", "microkernel.py", "norm.py", "rope.py", "activation.py", "embedding.py",
        "logprob.py", "attention.py", "attention_tile.py", "attention_backward.py", "optimizer.py",
        "reductions.py", "primitives.py",
    }  # fmt: skip
    sources = {path.name: path.read_text() for path in Path(cpu.__file__).parent.glob("*.py")}
    sources |= {name: (Path(ops.__file__).parent / name).read_text() for name in ("portable.py", "head.py")}
    for mutant in (*MUTANTS, *WIDE):
        texts = dict(sources)
        for file, old, new in mutant.edits:
            assert texts[file].count(old) == 1, (mutant.name, file, old)
            texts[file] = texts[file].replace(old, new)


@pytest.mark.parametrize("name", HERE)
def test_a_mutant_is_killed_and_its_point_named(name, tmp_path):
    (mutant,) = [m for m in MUTANTS if m.name == name]
    package = f"mutant_{MUTANTS.index(mutant)}"
    report = refuse(mutant, tmp_path, package, Workers(1))
    assert report is not None, "it was admitted"
    assert report["explanation"]["point"] == mutant.point, report["explanation"]
    assert report["difference"]["expected"] != report["difference"]["found"]
    assert report["region"] == mutant.region and report["case"] == mutant.case


def test_the_sample_has_a_mutant_of_every_point():
    assert {m.point for m in MUTANTS if m.name in HERE} == set(POINTS)


def test_the_recorded_run_of_mutants_of_size_killed_every_one():
    """Those that are wrong only from some size, head, share or value on; not for all of them is the point named."""
    rows = {row["mutant"]: row for row in json.loads(WIDE_RESULT.read_text())["mutants"]}
    assert set(rows) == {m.name for m in WIDE}
    assert all(row["killed"] and row["first_difference"] for row in rows.values())
    assert all(rows[m.name]["point"] == m.point for m in WIDE)


def test_the_recorded_run_of_all_mutants_names_every_point():
    recorded = json.loads(RESULT.read_text())
    rows = {row["mutant"]: row for row in recorded["mutants"]}
    assert set(rows) == {m.name for m in MUTANTS}
    for mutant in MUTANTS:
        row = rows[mutant.name]
        assert (row["point"], row["region"], row["case"]) == (mutant.point, mutant.region, mutant.case)
        assert row["killed"] and row["named"] == mutant.point, row
