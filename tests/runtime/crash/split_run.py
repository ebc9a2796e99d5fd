"""A run with its engine in another process that is killed while weights are in shared memory.

A process of its own (``python -m tests.runtime.crash.split_run FILE``), as ``vime run`` is: a forked child of a test
would share the test's resource tracker, which removes shared memory only when the test's own process ends.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.runtime.crash.scene import kill_self
from vime.pipeline.loading import load_pipeline
from vime.pipeline.prepare import Prepared, prepare
from vime.runtime.assembly import Sides, assemble
from vime.runtime.process import ProcessEngine
from vime.runtime.run_loop import run


def sides(prepared: Prepared, path: Path) -> Sides:
    """Prints the engine's process id and each segment's name; dies with the first update's weights sent."""
    made = assemble(prepared, path)
    assert isinstance(made.engine, ProcessEngine)
    print(f"engine {made.engine.pid}", flush=True)
    send = made.transport.send

    def sent(tensors: Any) -> Any:
        handle = send(tensors)
        print(f"segment {handle['segment']}", flush=True)
        if made.engine.committed() is not None:
            kill_self()  # weights are in shared memory, and nobody has let go of them
        return handle

    made.transport.send = sent  # type: ignore[method-assign]
    return made


if __name__ == "__main__":
    run(prepare(load_pipeline(Path(sys.argv[1]))), sides=sides)
