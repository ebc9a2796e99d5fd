"""Every mutant of the CPU kernels against admission: each has to be refused, with the right point of the six.

    python -m benchmarks.mutants [--only TEXT] [--out benchmarks/results/mutants.json]

Mutants are compiled one after the other (a few seconds each); CI runs some of them, this script all. Exit code 1 if one
survives or another point is named.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rlkernel.kernels.cpu.jit import source_digest
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.sources import cpu_toolchain, specification_digest
from tests.verify.mutants import MUTANTS, refuse


def judge(only: str) -> list[dict[str, Any]]:
    """One row a mutant: its point, what admission said, CPU seconds."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, mutant in enumerate(MUTANTS):
            if only not in mutant.name:
                continue
            start = time.process_time()
            report = refuse(mutant, Path(folder), f"mutant_{number}", Workers(1))
            explanation = (report or {}).get("explanation", {})
            rows.append(
                {
                    "mutant": mutant.name, "region": mutant.region, "case": mutant.case, "dtype": mutant.dtype,
                    "tp": mutant.tp, "point": mutant.point, "killed": report is not None,
                    "named": explanation.get("point"), "certain": explanation.get("certain", False),
                    "sentence": explanation.get("sentence", ""),
                    "first_difference": (report or {}).get("difference"), "problem": (report or {}).get("problem"),
                    "cpu_seconds": round(time.process_time() - start, 1),
                }
            )  # fmt: skip
            row = rows[-1]
            mark = "ok      " if row["named"] == row["point"] else "WRONG   " if row["killed"] else "SURVIVED"
            print(f"{mark} {row['mutant']}: {row['point']} -> {row['named']}: {row['sentence']}", flush=True)
    return rows


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = judge(options.only)
    wrong = [row["mutant"] for row in rows if row["named"] != row["point"]]
    summary = {
        "mutants": len(rows),
        "killed": sum(row["killed"] for row in rows),
        "right_point": len(rows) - len(wrong),
        "reproduced_bit_for_bit": sum(row["certain"] for row in rows),
        "by_point": dict(sorted(Counter(row["point"] for row in rows).items())),
    }
    print(json.dumps(summary))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "summary": summary, "kernels": source_digest(), "specification": specification_digest(),
            "toolchain": dict(cpu_toolchain()), "mutants": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
