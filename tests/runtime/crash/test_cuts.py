"""The log cut in its last records, and whatever no barrier covers gone: the run ends the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.crash.cutting import Moment, stop_after
from tests.runtime.crash.scene import (
    PLAIN,
    Whole,
    differences,
    other_digests,
)
from vime.timeline.log import read_log
from vime.timeline.manager import LOG_NAME


def cuts(moment: Moment) -> list[int]:
    """Of each of the last three records: one byte, all but the newline, all."""
    found: set[int] = set()
    for before, record in zip(moment.records[-4:-1], moment.records[-3:], strict=True):
        found |= {before.end + 1, record.end - 1, record.end}
    return sorted(found)


@pytest.mark.parametrize(("event", "count"), [("checkpoint_written", 1), ("sync_committed", 3), ("", 0)])
def test_log_cut_and_unsynced_files_gone(whole: Whole, base: Path, work: Path, event: str, count: int) -> None:
    whole(PLAIN)
    moment = stop_after(PLAIN, base / f"moment-{event}" / "run", event, count)
    for number, length in enumerate(cuts(moment)):
        path = work / f"cut-{length}" / "run"
        moment.cut(path, length, lose_unsynced=number % 4 != 1)
        compare = differences if number % 3 == 1 else other_digests
        assert compare(whole(PLAIN), PLAIN.finish(path)) == [], length


def test_log_cut_at_every_byte_keeps_whole_records(whole: Whole, tmp_path: Path) -> None:
    content = (whole(PLAIN).run_directory / LOG_NAME).read_bytes()
    records = read_log(whole(PLAIN).run_directory / LOG_NAME).records
    for length in range(records[-4].end, len(content) + 1, 7):
        (tmp_path / LOG_NAME).write_bytes(content[:length])
        found = read_log(tmp_path / LOG_NAME)
        assert found.end == max(record.end for record in records if record.end <= length)
        assert (found.tail is None) == (found.end == length)
