"""What ``numerics: exact`` costs a whole GRPO step against ``native``, on one H200.

    python -m benchmarks.gpu.overhead --out benchmarks/results/gpu_overhead_h200.json
    python -m benchmarks.gpu.overhead --steps 4 --set device=cpu ...          # tries it somewhere else

Two runs of one pipeline in one process, a step of one and a step of the other in turn: the same prompts, numbers of
samples and tokens, engine, scheduler, trainer, optimizer and log; the arithmetic is the contract's, or torch's: cuBLAS,
``scaled_dot_product_attention``, ``rms_norm``, ``log_softmax``, CUDA graphs in the same buckets. Times are those of the
runs' own reports; the first steps compile and are left out. ``overhead`` is exact / native - 1 of the medians.
"""

from __future__ import annotations

import argparse
import json
import pstats
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from cProfile import Profile
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch

from rlkernel.kernels.vendor.cublas import use_cublaslt
from vime.errors import Interrupted
from vime.pipeline.loading import load_pipeline
from vime.pipeline.prepare import Prepared, prepare
from vime.runtime.observer import RunOutcome, Silent
from vime.runtime.run_loop import run

LIBRARY = torch.backends.cuda.preferred_blas_library()
MODULE = "benchmarks.gpu.overhead"
PIPELINE = "pipelines/qwen3-1.7b-shape-h200.yaml"
ARMS = ("exact", "native")
NATIVE = ("numerics.rollout=native", "numerics.trainer=native", "on_mismatch=continue")
COMMON = ("checkpoint.every=0", "stages.evaluate.prompts=0")
SHOWN = ("mismatch_count", "distribution_mismatch_count", "max_abs_diff", "compared_tokens", "reward_mean")


class Turns:
    """Whose turn it is: one arm computes at a time."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._alive = list(ARMS)

    def wait(self, arm: str) -> None:
        """Until it is this arm's turn."""
        with self._condition:
            self._condition.wait_for(lambda: self._alive[0] == arm)

    def over(self, arm: str, *, leaves: bool = False) -> None:
        """The other's turn, if it is still there."""
        with self._condition:
            if arm in self._alive:
                self._alive.remove(arm)
                self._alive += [] if leaves else [arm]
            self._condition.notify_all()


def settings(arm: str) -> None:
    """The exact arm lets torch's products run in cuBLASLt without split-K; the native one as torch comes."""
    if arm == "exact":
        use_cublaslt()
        return
    torch.backends.cuda.preferred_blas_library(LIBRARY)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


class Arm(Silent):
    """Watches one run and gives its turn away after every step; calls of step ``profiled`` are counted."""

    def __init__(self, name: str, turns: Turns, last: int, profiled: int, folder: Path | None, deadline: float) -> None:
        self.name, self._turns, self._last, self._deadline = name, turns, last, deadline
        self._profiled, self._folder, self._profile = profiled, folder, Profile()
        self.reports: list[Mapping[str, Any]] = []

    def step_started(self, step: int) -> None:
        """Wait for the turn, with the settings of torch's products that this arm runs with."""
        self._turns.wait(self.name)
        if torch.cuda.is_available():
            settings(self.name)
        if step == self._profiled and self._folder is not None:
            self._profile.enable()

    def step_finished(self, report: Mapping[str, Any]) -> None:
        """Keep the report; what a run does after its last step is its own turn still."""
        self.reports.append(report)
        if report["step"] == self._profiled and self._folder is not None:
            self._profile.disable()
            with (self._folder / f"{self.name}.txt").open("w") as file:
                for order in ("tottime", "cumtime"):
                    pstats.Stats(self._profile, stream=file).sort_stats(order).print_stats(60)
        times = {stage: round(seconds, 4) for stage, seconds in report["time_s"].items()}
        print(
            self.name, report["step"], json.dumps({**times, **{name: report.get(name) for name in SHOWN}}), flush=True
        )
        if report["step"] < self._last:
            self._turns.over(self.name)

    def stop_requested(self) -> bool:
        """When the time is over; the run ends as one that can be resumed."""
        return time.monotonic() > self._deadline


def prepared(file: str, overrides: tuple[str, ...]) -> Prepared:
    """A checked pipeline."""
    return prepare(load_pipeline(Path(file), list(overrides)))


def both(given: argparse.Namespace, folder: Path) -> dict[str, Arm]:
    """Run both arms in turn; raises what the first of them raised."""
    turns, failures = Turns(), []
    steps = {"exact": max(given.steps, given.exact_steps), "native": given.steps}
    deadline = time.monotonic() + given.seconds
    arms = {name: Arm(name, turns, steps[name] - 1, given.skip - 1, given.profiles, deadline) for name in ARMS}

    def drive(arm: Arm) -> None:
        turns.wait(arm.name)
        try:
            own = (*COMMON, *given.overrides, f"steps={steps[arm.name]}", f"run_directory={folder / arm.name}")
            checked = prepared(given.pipeline, own + (NATIVE if arm.name == "native" else ()))
            outcome: RunOutcome = run(checked, observer=arm)
            print(arm.name, outcome.status, outcome.message, flush=True)
        except Interrupted as reason:
            print(arm.name, "stopped:", reason, flush=True)
        except BaseException as error:
            traceback.print_exc()
            failures.append(error)
        finally:
            turns.over(arm.name, leaves=True)

    threads = [Thread(target=drive, args=(arm,)) for arm in arms.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return arms


def compared(arms: Mapping[str, Arm], skip: int) -> dict[str, dict[str, float]]:
    """Stage -> medians of both arms in seconds over the steps that both have done, and the overhead."""
    done, result = min(len(arm.reports) for arm in arms.values()), {}
    for stage in arms["exact"].reports[-1]["time_s"] if done > skip else ():
        medians = {
            name: statistics.median(report["time_s"][stage] for report in arm.reports[skip:done])
            for name, arm in arms.items()
        }
        result[stage] = {**medians, "overhead": medians["exact"] / medians["native"] - 1}
    return result


def largest(arm: Arm) -> float:
    """Largest difference of two log-probabilities in any step."""
    return max((report.get("max_abs_diff") or 0.0 for report in arm.reports), default=0.0)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", default=PIPELINE)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip", type=int, default=3, help="First steps that are not counted.")
    parser.add_argument("--exact-steps", type=int, default=0, help="Steps of the exact arm, which goes on alone.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="After these both arms stop.")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--profiles", type=Path, help="Folder for a profile of each arm's last step that is left out.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        arms = both(given, Path(folder))
    stages = compared(arms, given.skip)
    for name, arm in arms.items():
        counts = {key: sum(report.get(key) or 0 for report in arm.reports) for key in SHOWN[:2] + SHOWN[3:4]}
        print(name, len(arm.reports), "steps", json.dumps(counts), "largest difference", largest(arm))
    for stage, row in stages.items():
        print(
            f"{stage:10s} exact {row['exact']:8.4f} s  native {row['native']:8.4f} s  {100 * row['overhead']:+7.1f} %"
        )
    if given.out is not None:
        from benchmarks.gpu.timing import about

        result = {
            **about(MODULE, sys.argv[1:] if arguments is None else arguments),
            "pipeline": given.pipeline,
            "steps": given.steps,
            "left_out": given.skip,
            "stages": stages,
            "reports": {
                name: [{key: report.get(key) for key in ("step", "time_s", *SHOWN)} for report in arm.reports]
                for name, arm in arms.items()
            },
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
