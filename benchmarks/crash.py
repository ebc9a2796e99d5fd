"""Kills runs everywhere and resumes them: does each end with the digest of the run that nobody disturbed?

Run as ``python -m benchmarks.crash``. Sections:

random      ``vime run`` as a process of its own, ``kill -9`` at a random moment, ``vime resume`` killed as well by half
            the trials, then resumed to the end; a quarter with the engine in another process and shared memory
stages      killed at everything that a run tells its observer: every stage, sample, step and evaluation
operations  killed inside operations on files (half of a write is done), half the cases with everything gone that was
            not synced: contents, and names in folders
full_disk   from an operation on a file onwards the disk is full: exit code 3, then resumed with room
cuts        the log cut at every byte of its last three records, at two moments, without the files that were written
            after the last barrier before the cut

Every case compares run digest and weights digest; all but the cuts in the middle of a record also compare every event
and array with the undisturbed run and verify the whole directory. A section's result replaces that section in the
result file. Exit code 1 if any case differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine, write_result
from tests.runtime.crash.cutting import Moment, stop_after
from tests.runtime.crash.disk import FileOperations, kill_at, operations
from tests.runtime.crash.scene import Scene, StageKiller, differences, in_child, other_digests, was_killed
from vime.cli.main import invoke
from vime.runtime.observer import RunOutcome
from vime.store.run_directory import RunView
from vime.timeline.manager import LOG_NAME

SECTIONS = ("random", "stages", "operations", "full_disk", "cuts")
SCENE = Scene(user=True)
SPLIT = Scene(user=True, placement="split", transport="shm")
SHORT = Scene(user=True, steps=2, every=1)
MOMENTS = (("sync_committed", 3), ("", 0))
ROOT = Path(__file__).parents[1]


@dataclass
class Section:
    """What the cases of a section came to. ``problems``: case -> differences."""

    name: str
    cases: int = 0
    kills: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)
    places: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, case: str, kills: int, found: list[str], place: str) -> None:
        """Count a case; say at once what differs."""
        self.cases += 1
        self.kills += kills
        self.places[place] += 1
        if found:
            self.problems[case] = found
            print(f"{self.name}, {case}: {found}", flush=True)

    def line(self) -> str:
        """One line of the table."""
        return (
            f"{self.name:12} {self.cases:6} cases {self.kills:6} kills or stops   {self.cases - len(self.problems):6} "
            f"with the digest of the undisturbed run, {len(self.problems)} without   {self.seconds:7.0f} s"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "cases": self.cases,
            "kills": self.kills,
            "same_digest": self.cases - len(self.problems),
            "other_digest": len(self.problems),
            "problems": self.problems,
            "places": dict(sorted(self.places.items())),
            "seconds": round(self.seconds, 1),
        }


Case = tuple[str, int, list[str], str]
"""What it was, how often it was killed or stopped, what differed in the end, and where it was killed or stopped."""
Job = Callable[[Path], Case]
"""One case, in an empty folder."""


@dataclass(frozen=True)
class Experiment:
    """A folder to work in, the undisturbed run, and how many cases run side by side."""

    folder: Path
    whole: RunOutcome
    draw: random.Random
    workers: int

    def run(self, section: Section, jobs: Sequence[Job]) -> None:
        """Run all jobs in forked workers, and count what they come to."""
        children = [self._fork(section, number, jobs[number :: self.workers]) for number in range(self.workers)]
        for child, results in children:
            _, status = os.waitpid(child, 0)
            for line in results.read_text().splitlines():
                section.add(*json.loads(line))
            if status:
                section.add(f"a worker, {results.name}", 0, [f"it ended with status {status}"], "worker")
        if section.cases < len(jobs):
            section.add("all", 0, [f"{section.cases} of {len(jobs)} cases came to an end"], "worker")

    def _fork(self, section: Section, number: int, jobs: Sequence[Job]) -> tuple[int, Path]:
        folder = self.folder / f"{section.name}-{number}"
        folder.mkdir()
        results = folder / "results"
        results.touch()
        child = os.fork()
        if child:
            return child, results
        code = 1
        try:
            for count, job in enumerate(jobs):
                case = job(folder / f"case-{count}")
                with results.open("a") as file:
                    file.write(json.dumps(case) + "\n")
                shutil.rmtree(folder / f"case-{count}", ignore_errors=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


# --------------------------------------------------------------------------------------- processes of their own


def _command(*arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vime.cli.main", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _started(process: subprocess.Popen[bytes], path: Path, size: int) -> bool:
    """Wait until the process has written to the log; False if it ended first."""
    while process.poll() is None:
        if (path / LOG_NAME).is_file() and (path / LOG_NAME).stat().st_size != size:
            return True
        time.sleep(0.002)
    return False


def _size(path: Path) -> int:
    return (path / LOG_NAME).stat().st_size if (path / LOG_NAME).is_file() else 0


def _kill_at_random(process: subprocess.Popen[bytes], path: Path, latest: float, draw: random.Random) -> bool:
    """Kill -9 within ``latest`` seconds of the first write to the log; whether it came in time."""
    if _started(process, path, _size(path)):
        time.sleep(draw.uniform(0, latest))
    ended = process.poll() is not None
    process.kill()
    process.communicate()
    return not ended


def _children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append(int(status.parent.name))
    return found


def random_kills(experiment: Experiment, section: Section, count: int) -> None:
    """See the module's text."""
    path = experiment.folder / "timing" / "run"
    process = _command("run", str(SCENE.file(path)))
    assert _started(process, path, 0)
    begun = time.perf_counter()
    process.communicate()
    length = time.perf_counter() - begun

    def job(trial: int, folder: Path) -> Case:
        draw, scene = random.Random(1000 * count + trial), SPLIT if trial % 4 == 3 else SCENE
        path, shared = folder / "run", set(os.listdir("/dev/shm"))
        process = _command("run", str(scene.file(path)))
        children: list[int] = []
        if _started(process, path, 0):
            children = _children_of(process.pid)
            time.sleep(draw.uniform(0, length))
        kills = int(process.poll() is None)
        process.kill()
        process.communicate()
        last = RunView.open(path).records
        place = last[-1].event.type if last else "before the first event"
        while kills and kills < 3 and draw.random() < 0.5:
            kills += _kill_at_random(_command("resume", str(path)), path, length / 2, draw)
        process = _command("resume", str(path))
        _, said = process.communicate()
        found = [] if process.returncode == 0 else [f"exit code {process.returncode}: {said.decode()}"]
        found += differences(experiment.whole, scene.finish(path))
        found += [f"process {pid} outlived its parent" for pid in children if Path(f"/proc/{pid}").exists()]
        left = set(os.listdir("/dev/shm")) - shared
        if left:  # of other trials, perhaps, which hold theirs for moments
            time.sleep(5)
        found += [f"shared memory {name} is left" for name in left & set(os.listdir("/dev/shm"))]
        return f"trial {trial} ({scene.placement}, killed after {place})", kills, found, f"after {place}"

    experiment.run(section, [partial(job, trial) for trial in range(count)])


# ------------------------------------------------------------------------------------------ children of this one


def stage_kills(experiment: Experiment, section: Section) -> None:
    """See the module's text."""
    counting = StageKiller()
    SCENE.start(experiment.folder / "told" / "run", counting)

    def job(what: str, time: int, folder: Path) -> Case:
        killer = StageKiller(what, time)
        status = in_child(lambda: SCENE.start(folder / "run", killer), folder / "said")
        assert was_killed(status), (folder / "said").read_text()
        return f"{what}, time {time}", 1, differences(experiment.whole, SCENE.finish(folder / "run")), what

    seen: Counter[str] = Counter()
    jobs = []
    for what in counting.told:
        seen[what] += 1
        jobs.append(partial(job, what, seen[what]))
    experiment.run(section, jobs)


def operation_kills(experiment: Experiment, section: Section, stride: int) -> None:
    """See the module's text."""
    listed = operations(SCENE, experiment.folder / "operations")

    def job(number: int, power_loss: bool, folder: Path) -> Case:
        died = kill_at(SCENE, folder, number, power_loss=power_loss)
        found = differences(experiment.whole, SCENE.finish(folder / "run"))
        lost = ", power lost" if power_loss else ""
        what = died.split()[2] if died else "nothing"
        return f"operation {number}, {died or 'it ended before'}{lost}", int(bool(died)), found, f"{what}{lost}"

    jobs = []
    for number, what in enumerate(listed, start=1):
        if "timeline.jsonl" in what:
            jobs += [partial(job, number, True), partial(job, number, False)]
        elif (number + experiment.draw.randrange(stride)) % stride == 0:
            jobs.append(partial(job, number, bool(experiment.draw.getrandbits(1))))
    experiment.run(section, jobs)


def full_disks(experiment: Experiment, section: Section, stride: int) -> None:
    """See the module's text. Where the last files are views, a run may be over before it needs the disk."""
    listed = operations(SCENE, experiment.folder / "listing")
    last = max(number for number, what in enumerate(listed, start=1) if "timeline.jsonl" in what)

    def job(number: int, folder: Path) -> Case:
        folder.mkdir()

        def fill() -> int:
            FileOperations(folder, number, full=True).install()
            return invoke(["run", str(SCENE.file(folder / "run"))])

        status = in_child(fill, folder.parent / "said")
        code, text = os.waitstatus_to_exitcode(status), (folder.parent / "said").read_text()
        found = [] if code == 3 or (code == 0 and number > last) else [f"exit code {code}: {text}"]
        found += [text] if "Traceback" in text else []
        found += differences(experiment.whole, SCENE.finish(folder / "run"))
        return f"full from operation {number}", 1, found, f"exit code {code}"

    first = 1 + experiment.draw.randrange(stride)
    experiment.run(section, [partial(job, number) for number in range(first, len(listed) + 1, stride)])


def log_cuts(experiment: Experiment, section: Section, stride: int) -> None:
    """See the module's text. Runs are shorter, and nothing is really synced: what syncs protect is taken by hand."""
    fsync = os.fsync
    os.fsync = lambda fd: None
    try:
        whole = SHORT.start(experiment.folder / "short" / "run")

        def job(moment: Moment, length: int, by_event: bool, kinds: str, folder: Path) -> Case:
            moment.cut(folder / "run", length)
            outcome = SHORT.finish(folder / "run")
            found = differences(whole, outcome) if by_event else other_digests(whole, outcome)
            return f"cut at byte {length} of {kinds}", 1, found, kinds

        jobs = []
        for event, count in MOMENTS:
            moment = stop_after(SHORT, experiment.folder / f"moment-{event}" / "run", event, count)
            records = moment.records
            kinds = ", ".join(record.event.type for record in records[-3:])
            near = {record.end + offset for record in records[-4:] for offset in (-1, 0, 1)}
            for length in range(records[-4].end, records[-1].end + 1):
                if length % stride == 0 or length in near:
                    jobs.append(partial(job, moment, length, length in near, kinds))
        experiment.run(section, jobs)
    finally:
        os.fsync = fsync


def run_section(experiment: Experiment, options: argparse.Namespace, name: str) -> Section:
    """One section by its name."""
    section, begun = Section(name), time.perf_counter()
    if name == "random":
        random_kills(experiment, section, options.kills)
    elif name == "stages":
        stage_kills(experiment, section)
    elif name == "operations":
        operation_kills(experiment, section, options.operation_stride)
    elif name == "full_disk":
        full_disks(experiment, section, options.full_stride)
    else:
        log_cuts(experiment, section, options.cut_stride)
    section.seconds = time.perf_counter() - begun
    print(section.line(), flush=True)
    return section


def main() -> int:
    """Run the experiment; print a line a section and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20, help="trials of the section random")
    parser.add_argument("--operation-stride", type=int, default=5, help="one in so many operations; of the log all")
    parser.add_argument("--full-stride", type=int, default=10)
    parser.add_argument("--cut-stride", type=int, default=1, help="1: every byte")
    parser.add_argument("--output", type=Path, default=RESULTS / "crash.json")
    parser.add_argument("--workers", type=int, default=2, help="cases side by side")
    options = parser.parse_args()
    output = options.output.absolute()
    here, sections = Path.cwd(), []
    with tempfile.TemporaryDirectory(prefix="vime-crash-") as name:
        folder = Path(name)
        os.chdir(folder)
        try:
            whole = SCENE.start(folder / "whole" / "run")
            experiment = Experiment(folder, whole, random.Random(options.seed), options.workers)
            for section in options.sections:
                sections.append(run_section(experiment, options, section))
                write_result(output, _merged(output, options, whole, sections[-1]))
        finally:
            os.chdir(here)
    failed = sum(len(section.problems) for section in sections)
    print(f"{sum(section.cases for section in sections)} cases, {failed} without the digest of the undisturbed run")
    return 1 if failed else 0


def _merged(output: Path, options: argparse.Namespace, whole: RunOutcome, section: Section) -> dict[str, Any]:
    """The result file's content: this section, and the others as they were."""
    found = json.loads(output.read_text())["sections"] if output.is_file() else {}
    found[section.name] = {
        **section.as_json(),
        "settings": {key: value for key, value in vars(options).items() if key not in ("output", "sections")},
        "run_digest": whole.extra["run_digest"],
        "weights_digest": whole.manifest_digest,
        "machine": machine(1),
    }
    return {
        "pipeline": SCENE.pipeline(Path("RUN")),
        "sections": {name: found[name] for name in SECTIONS if name in found},
    }


if __name__ == "__main__":
    sys.exit(main())
