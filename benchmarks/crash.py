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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine, write_result
from tests.runtime.crash.cutting import stop_after
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


@dataclass
class Experiment:
    """A folder to work in, and the undisturbed run."""

    folder: Path
    whole: RunOutcome
    draw: random.Random

    def place(self, name: str) -> Path:
        """An empty folder for one case."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def done(self, path: Path) -> None:
        """Forget a case."""
        for left in self.folder.glob(f"{path.name}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


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
    path = experiment.place("timing") / "run"
    process = _command("run", str(SCENE.file(path)))
    assert _started(process, path, 0)
    begun = time.perf_counter()
    process.communicate()
    length = time.perf_counter() - begun
    for trial in range(count):
        scene = SPLIT if trial % 4 == 3 else SCENE
        path = experiment.place(f"random-{trial}") / "run"
        shared = set(os.listdir("/dev/shm"))
        process = _command("run", str(scene.file(path)))
        children: list[int] = []
        if _started(process, path, 0):
            children = _children_of(process.pid)
            time.sleep(experiment.draw.uniform(0, length))
        kills = int(process.poll() is None)
        process.kill()
        process.communicate()
        last = RunView.open(path).records
        place = last[-1].event.type if last else "before the first event"
        while kills and kills < 3 and experiment.draw.random() < 0.5:
            kills += _kill_at_random(_command("resume", str(path)), path, length / 2, experiment.draw)
        process = _command("resume", str(path))
        _, said = process.communicate()
        found = [] if process.returncode == 0 else [f"exit code {process.returncode}: {said.decode()}"]
        found += differences(experiment.whole, scene.finish(path))
        found += [f"process {pid} outlived its parent" for pid in children if Path(f"/proc/{pid}").exists()]
        found += [f"shared memory {name} is left" for name in set(os.listdir("/dev/shm")) - shared]
        section.add(f"trial {trial} ({scene.placement}, killed after {place})", kills, found, f"after {place}")
        experiment.done(path.parent)


# ------------------------------------------------------------------------------------------ children of this one


def stage_kills(experiment: Experiment, section: Section) -> None:
    """See the module's text."""
    counting = StageKiller()
    SCENE.start(experiment.place("told") / "run", counting)
    seen: Counter[str] = Counter()
    for what in counting.told:
        seen[what] += 1
        path = experiment.place("stage") / "run"
        killer = StageKiller(what, seen[what])
        status = in_child(lambda path=path, killer=killer: SCENE.start(path, killer), experiment.folder / "said")  # type: ignore[misc]
        assert was_killed(status), (experiment.folder / "said").read_text()
        found = differences(experiment.whole, SCENE.finish(path))
        section.add(f"{what}, time {seen[what]}", 1, found, what)
        experiment.done(path.parent)


def operation_kills(experiment: Experiment, section: Section, stride: int) -> None:
    """See the module's text."""
    listed = operations(SCENE, experiment.place("operations"))
    for number in range(1, len(listed) + 1):
        in_log = "timeline.jsonl" in listed[number - 1]
        if (number + experiment.draw.randrange(stride)) % stride and not in_log:
            continue
        for power_loss in (True, False) if in_log else (bool(experiment.draw.getrandbits(1)),):
            work = experiment.place("operation")
            died = kill_at(SCENE, work, number, power_loss=power_loss)
            found = differences(experiment.whole, SCENE.finish(work / "run"))
            what = died.split()[2] if died else "nothing"
            case = f"operation {number}, {died or 'it ended before'}{', power lost' if power_loss else ''}"
            section.add(case, int(bool(died)), found, f"{what}{', power lost' if power_loss else ''}")
            experiment.done(work)


def full_disks(experiment: Experiment, section: Section, stride: int) -> None:
    """See the module's text."""
    count = len(operations(SCENE, experiment.place("listing")))
    for number in range(1 + experiment.draw.randrange(stride), count + 1, stride):
        work = experiment.place("full")
        work.mkdir()

        def fill(work: Path = work, number: int = number) -> int:
            FileOperations(work, number, full=True).install()
            return invoke(["run", str(SCENE.file(work / "run"))])

        said = experiment.folder / "said"
        status = in_child(fill, said)
        code, text = os.waitstatus_to_exitcode(status), said.read_text()
        found = [] if code == 3 or (code == 0 and number > count - 40) else [f"exit code {code}: {text}"]
        if "Traceback" in text:
            found.append(text)
        found += differences(experiment.whole, SCENE.finish(work / "run"))
        section.add(f"full from operation {number}", 1, found, f"exit code {code}")
        experiment.done(work)


def log_cuts(experiment: Experiment, section: Section, stride: int) -> None:
    """See the module's text. Runs are shorter, and nothing is really synced: what syncs protect is taken by hand."""
    fsync = os.fsync
    os.fsync = lambda fd: None
    try:
        whole = SHORT.start(experiment.place("short") / "run")
        for event, count in MOMENTS:
            moment = stop_after(SHORT, experiment.place(f"moment-{event}") / "run", event, count)
            records = moment.records
            kinds = ", ".join(record.event.type for record in records[-3:])
            ends = {record.end for record in records}
            for length in range(records[-4].end, records[-1].end + 1):
                whole_record = length in ends or length - 1 in ends or length + 1 in ends
                if length % stride and not whole_record:
                    continue
                path = experiment.place("cut") / "run"
                moment.cut(path, length)
                outcome = SHORT.finish(path)
                found = differences(whole, outcome) if whole_record else other_digests(whole, outcome)
                section.add(f"cut at byte {length} of {kinds}", 1, found, kinds)
                experiment.done(path.parent)
    finally:
        os.fsync = fsync


def _sections(experiment: Experiment, options: argparse.Namespace) -> Iterator[Section]:
    for name in options.sections:
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
        yield section


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
    options = parser.parse_args()
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="vime-crash-") as name:
        folder = Path(name)
        os.chdir(folder)
        try:
            whole = SCENE.start(folder / "whole" / "run")
            sections = list(_sections(Experiment(folder, whole, random.Random(options.seed)), options))
        finally:
            os.chdir(here)
    failed = sum(len(section.problems) for section in sections)
    print(f"{sum(section.cases for section in sections)} cases, {failed} without the digest of the undisturbed run")
    write_result(options.output, _merged(options, whole, sections))
    return 1 if failed else 0


def _merged(options: argparse.Namespace, whole: RunOutcome, sections: list[Section]) -> dict[str, Any]:
    """The result file's content: these sections, and the others as they were."""
    before = json.loads(options.output.read_text()) if options.output.is_file() else {"sections": {}}
    named = {
        section.name: {
            **section.as_json(),
            "settings": {key: value for key, value in vars(options).items() if key not in ("output", "sections")},
            "run_digest": whole.extra["run_digest"],
            "weights_digest": whole.manifest_digest,
            "machine": machine(1),
        }
        for section in sections
    }
    found = {**before["sections"], **named}
    return {
        "pipeline": SCENE.pipeline(Path("RUN")),
        "sections": {name: found[name] for name in SECTIONS if name in found},
    }


if __name__ == "__main__":
    sys.exit(main())
