"""Every mutant of the CPU kernels against admission: each has to be refused, with the right point of the six.

    python -m benchmarks.mutants [--only EXPRESSION] [--out benchmarks/results/mutants.json [--keep]]

Mutants are compiled one after the other (a few seconds each); CI runs some of them, this script all. Exit code 1 if one
survives or another point is named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import rlkernel.kernels.cpu as cpu
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.sources import cpu_toolchain, digest_of_files, specification_digest
from tests.verify.mutants import MUTANTS, Mutant, refuse
from tests.verify.mutants_wide import WIDE


def judge(mutant: Mutant, folder: Path, number: int) -> dict[str, Any]:
    """A row: the mutant's point, what admission said, CPU seconds, and digests of the kernels and of the admission."""
    start = time.process_time()
    report = refuse(mutant, folder, f"mutant_{number}", Workers(1))
    explanation = (report or {}).get("explanation", {})
    return {
        "mutant": mutant.name, "region": mutant.region, "case": mutant.case, "dtype": mutant.dtype,
        "tp": mutant.tp, "point": mutant.point, "killed": report is not None,
        "named": explanation.get("point"), "certain": explanation.get("certain", False),
        "sentence": explanation.get("sentence", ""), "alternatives": explanation.get("alternatives", []),
        "first_difference": (report or {}).get("difference"), "problem": (report or {}).get("problem"),
        "cpu_seconds": round(time.process_time() - start, 1), "kernels": kernels_digest(),
        "specification": specification_digest(),
    }  # fmt: skip


def kernels_digest() -> str:
    """Of the kernels' sources as they are now: they are read again for every mutant."""
    return digest_of_files(sorted(Path(cpu.__file__).parent.glob("*.py")))


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many were killed, and how many with the right point."""
    return {
        "mutants": len(rows),
        "killed": sum(row["killed"] for row in rows),
        "right_point": sum(row["named"] == row["point"] for row in rows),
        "reproduced_bit_for_bit": sum(row["certain"] for row in rows),
        "by_point": dict(sorted(Counter(row["point"] for row in rows).items())),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows)),
    }


def main() -> int:
    """Run, print, write after every mutant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants in whose name this expression is found")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of mutants that are not run now")
    parser.add_argument("--wide", action="store_true", help="those that are wrong only from some size or value on")
    options = parser.parse_args()
    mutants = WIDE if options.wide else MUTANTS
    kept = json.loads(options.out.read_text())["mutants"] if options.keep else []
    rows = {row["mutant"]: row for row in kept if not re.search(options.only, row["mutant"])}
    specification_digest()  # of the sources that are loaded now, for all rows of this run
    with tempfile.TemporaryDirectory() as folder:
        for number, mutant in enumerate(mutants):
            if not re.search(options.only, mutant.name):
                continue
            row = rows[mutant.name] = judge(mutant, Path(folder), number)
            mark = "ok      " if row["named"] == row["point"] else "WRONG   " if row["killed"] else "SURVIVED"
            print(f"{mark} {row['mutant']}: {row['point']} -> {row['named']}: {row['sentence']}", flush=True)
            if options.out is not None:
                write(options.out, rows)
    print(json.dumps(summarise(list(rows.values()))))
    return 1 if any(row["named"] != row["point"] for row in rows.values()) else 0


def write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """All rows in the mutants' order, below their summary."""
    ordered = [rows[mutant.name] for mutant in (*MUTANTS, *WIDE) if mutant.name in rows]
    data = {"summary": summarise(ordered), "toolchain": dict(cpu_toolchain()), "mutants": ordered}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
