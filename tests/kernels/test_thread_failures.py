"""Worker threads where something goes wrong: no memory, a fork, a signal, a pool that is closed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlkernel.kernels.cpu.gemm import matmul
from rlkernel.kernels.cpu.panels import pack_rows
from rlkernel.kernels.cpu.threads import ThreadPool, Workers

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads share work where there are two CPUs")
NO_MEMORY = """
import os, resource, sys
import numpy as np
from rlkernel.kernels.cpu.gemm import matmul
from rlkernel.kernels.cpu.panels import pack_rows
from rlkernel.kernels.cpu.threads import Workers
depth, workers, alone = 4096, Workers(2), Workers(1)
draw = np.random.default_rng(0)
panels = pack_rows(draw.standard_normal((256, depth), dtype=np.float32), alone)
a = draw.standard_normal((96, depth), dtype=np.float32)
expected = matmul(a, panels, alone, leaves=depth)
found = matmul(a, panels, workers, leaves=depth)
assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
outcomes = []
for room in (150_000_000, 60_000_000, 20_000_000) * 3:
    out = np.full((96, 256), np.nan, np.float32)
    workers.wake()
    for _ in range(5000):
        if workers.listeners() is not None:
            break
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, -1))
    try:
        matmul(a, panels, workers, leaves=depth, out=out)
        outcomes.append("computed" if np.array_equal(out.view(np.uint32), expected.view(np.uint32)) else "WRONG")
    except MemoryError:
        outcomes.append("MemoryError")
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert np.array_equal(matmul(a, panels, workers, leaves=depth).view(np.uint32), expected.view(np.uint32))
workers.probe()
print(*sorted(set(outcomes)))
"""


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32)


def problem() -> tuple[np.ndarray, Any, np.ndarray]:
    """A product that is worth another thread, and its result by one."""
    draw, alone = np.random.default_rng(1), Workers(1)
    panels = pack_rows(draw.standard_normal((2048, 512), dtype=np.float32), alone)
    a = draw.standard_normal((64, 512), dtype=np.float32)
    return a, panels, matmul(a, panels, alone)


def ends(function: Callable[[], object]) -> None:
    """The function ends in a thread of its own, with a value or an error."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@needs_two
def test_a_lack_of_memory_is_an_error_of_the_caller_and_leaves_the_threads_in_order() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.split()
    assert "MemoryError" in outcomes and "WRONG" not in outcomes
    assert "Exception ignored" not in done.stderr


@needs_two
def test_a_forked_process_computes_alone() -> None:
    a, panels, expected = problem()
    workers = Workers(3)
    matmul(a, panels, workers)
    child = os.fork()
    if not child:
        code = 1
        try:
            workers.probe()
            workers.wake()
            code = 0 if np.array_equal(bits(matmul(a, panels, workers)), bits(expected)) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits for threads that it does not have")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(found[1]) == 0


def test_two_threads_can_probe_at_once() -> None:
    workers = Workers(3)
    errors: list[BaseException] = []

    def often() -> None:
        try:
            for _ in range(200):
                workers.probe()
        except BaseException as error:
            errors.append(error)

    callers = [threading.Thread(target=often, daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(50)
    assert not errors and not any(caller.is_alive() for caller in callers)


def test_nothing_is_queued_behind_the_end_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(2)
    apart = ThreadPool._keep_apart

    def closed_meanwhile(pool: ThreadPool) -> None:
        apart(pool)
        workers.close()

    monkeypatch.setattr(ThreadPool, "_keep_apart", closed_meanwhile)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            workers.run(lambda first, last: None, 100)
        except RuntimeError as error:
            raised.append(error)

    ends(run)
    assert len(raised) == 1


@needs_two
def test_a_signal_leaves_a_product_only_when_nobody_writes_any_more() -> None:
    a, panels, _ = problem()
    workers = Workers(2)
    release, begun = threading.Event(), threading.Event()

    def occupied() -> None:
        begun.set()
        release.wait(60)

    pool = workers._pool
    assert pool is not None
    pool.submit(occupied)
    assert begun.wait(60)

    def interrupt(*_: object) -> None:
        threading.Timer(0.5, release.set).start()  # the thread is free long after the signal
        raise KeyboardInterrupt

    out = np.zeros((64, 2048), np.float32)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            matmul(a, panels, workers, out=out)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    out[...] = -1.0
    workers.probe()
    time.sleep(0.2)
    assert (out == -1.0).all()


def test_threads_end_where_the_system_refuses_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            ThreadPool(4)
    for thread in started:
        thread.join(10)
    assert len(started) == 2 and not any(thread.is_alive() for thread in started)
