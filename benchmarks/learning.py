"""The learning curve of a recorded run: what ``vime report FOLDER --json`` printed, as a result file and a drawing.

vime report runs/smollm2-sums --json > sums.jsonl
python -m benchmarks.learning sums.jsonl --pipeline pipelines/smollm2-sums-h200.yaml --date 2026-11-30
    --device "NVIDIA H200" --out benchmarks/results/smollm2_sums_h200.json --svg docs/smollm2-sums.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vime.report.charts import Series, line_chart

STEP = ("step", "reward_mean", "compared_tokens", "mismatch_count", "distribution_mismatch_count", "max_abs_diff")
SUMS = ("num_tokens", "compared_tokens", "mismatch_count", "distribution_mismatch_count")
STYLE = """<style>
svg { background: #ffffff; font-family: ui-sans-serif, system-ui, sans-serif; font-size: 11px }
.tick { fill: #63666b } .grid { stroke: #ececE8 } .line { fill: none; stroke-width: 2 }
.line.c1 { stroke: #3a5ccc } .line.c2 { stroke: #d9822b } .dot.c1 { fill: none } .dot.c2 { fill: #d9822b }
</style>"""


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Events by name. Raises ValueError where the file has no step."""
    events: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        events.setdefault(event.pop("event"), []).append(event)
    if not events.get("step"):
        raise ValueError(f"{path} holds no step of a run: {sorted(events)}")
    return events


def drawing(events: dict[str, list[dict[str, Any]]]) -> str:
    """Mean reward by step as an SVG document: training as a line, held out as dots."""
    series = [
        Series("training", [(step["step"], step["reward_mean"]) for step in events["step"]], "c1"),
        Series("held out", [(e["step"], e["reward_mean"]) for e in events.get("evaluation", [])], "c2", dots=True),
    ]
    svg = line_chart("Mean reward by step: training (line), held out (dots)", series, width=760, bounds=(0.0, 1.0))
    head, body = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{STYLE}{body}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("events", type=Path, help="the output of vime report FOLDER --json")
    for name in ("pipeline", "date", "device"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--version", action="append", default=[], metavar="NAME=VERSION")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--svg", type=Path, required=True)
    arguments = parser.parse_args()
    events = read(arguments.events)
    result = {
        "command": f"vime run {arguments.pipeline}",
        "date": arguments.date,
        "device": arguments.device,
        "versions": dict(item.split("=", 1) for item in arguments.version),
        "seconds in steps": round(sum(step["time_s"]["total"] for step in events["step"]), 1),
        **{name: sum(step[name] for step in events["step"]) for name in SUMS},
        "evaluations": events.get("evaluation", []),
        "steps": [{name: step[name] for name in STEP} for step in events["step"]],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    arguments.svg.write_text(drawing(events))
    return 0


if __name__ == "__main__":
    sys.exit(main())
