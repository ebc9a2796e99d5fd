"""Worker threads: what they compute, listen for and end with, never how fast."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from rlkernel.kernels.cpu import gemm, threads
from rlkernel.kernels.cpu.gemm import matmul
from rlkernel.kernels.cpu.panels import pack_rows
from rlkernel.kernels.cpu.spinning import ASLEEP, JOB, LISTENING, STATE
from rlkernel.kernels.cpu.threads import ThreadPool, Workers

DRAW = np.random.default_rng(0)
LEFT = DRAW.standard_normal((48, 96)).astype(np.float32)
RIGHT = DRAW.standard_normal((320, 96)).astype(np.float32)
needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads listen where there are two CPUs")


def listening(pool: ThreadPool) -> bool:
    """Whether a thread listens, or begins to when it is woken."""
    for _ in range(200):
        pool.wake()
        for _ in range(50):
            if pool.listeners() is not None:
                return True
            time.sleep(20e-6)
    return False


@pytest.fixture
def everything_is_shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every product is worth another thread, which listens on and on; how many each could have is noted."""
    monkeypatch.setattr(gemm, "_SHARED_NANOSECONDS", 1.0)
    monkeypatch.setattr(threads, "turns_of_a_wait", lambda: 1 << 50)
    noted: list[int] = []
    whole = Workers.listeners

    def watched(self: Workers) -> np.ndarray | None:
        boxes = whole(self)
        noted.append(0 if boxes is None else int((boxes[:, STATE] == LISTENING).sum()))
        return boxes

    monkeypatch.setattr(Workers, "listeners", watched)
    return noted


@needs_two
def test_products_of_threads_that_listen_have_the_same_bits(everything_is_shared: list[int]) -> None:
    workers, alone = Workers(2), Workers(1)
    panels = pack_rows(RIGHT, alone)
    bias = DRAW.standard_normal(320).astype(np.float32)
    for case in ({}, {"leaves": 4}, {"bias": bias}, {"bf16": True}, {"leaves": 2, "real": 50, "bias": bias}):
        expected = matmul(LEFT, panels, alone, **case)
        for _ in range(200):
            found = matmul(LEFT, panels, workers, **case)
            assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert sum(everything_is_shared) > 900, "products were not shared"
    assert workers._pool is not None
    assert workers._pool._boxes[0, JOB] != 0, "the thread never had a job"
    workers.close()


@needs_two
def test_two_callers_share_one_thread(everything_is_shared: list[int]) -> None:
    workers, alone = Workers(2), Workers(1)
    panels = pack_rows(RIGHT, alone)
    expected = matmul(LEFT, panels, alone).view(np.uint32)
    wrong: list[int] = []

    def call() -> None:
        for _ in range(300):
            wrong.append(int((matmul(LEFT, panels, workers).view(np.uint32) != expected).sum()))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert wrong == [0] * 900
    workers.close()


@needs_two
def test_threads_fall_asleep_and_end() -> None:
    pool = ThreadPool(1)
    assert listening(pool)
    end = time.monotonic() + 5.0
    while pool._boxes[0, STATE] != ASLEEP and time.monotonic() < end:
        time.sleep(0.001)
    assert pool._boxes[0, STATE] == ASLEEP
    pool.wake()
    pool.close()
    pool._threads[0].join(5)
    assert not pool._threads[0].is_alive()
    assert pool.listeners() is None
    pool.wake()
    with pytest.raises(RuntimeError, match="were closed"):
        pool.submit(print)


def test_more_threads_than_processors_do_not_listen() -> None:
    workers = Workers(len(os.sched_getaffinity(0)) + 1)
    workers.wake()
    time.sleep(0.01)
    assert workers.listeners() is None
    panels = pack_rows(RIGHT, workers)
    assert np.array_equal(matmul(LEFT, panels, workers), matmul(LEFT, panels, Workers(1)))
    workers.close()


@needs_two
def test_a_forked_child_asks_no_thread_of_its_parent(everything_is_shared: list[int]) -> None:
    workers = Workers(2)
    panels = pack_rows(RIGHT, workers)
    assert workers._pool is not None
    expected = matmul(LEFT, panels, Workers(1))
    for _ in range(20):
        assert listening(workers._pool)
        child = os.fork()
        if child == 0:
            os._exit(int(not np.array_equal(matmul(LEFT, panels, workers), expected)))
        end = time.monotonic() + 20.0
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.005)
        if ended[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert ended == (child, 0)
    workers.close()


@needs_two
def test_threads_leave_their_callers_processor() -> None:
    workers = Workers(2)
    assert workers._pool is not None
    whole = os.sched_getaffinity(0)
    try:
        for cpu in sorted(whole)[:2]:
            os.sched_setaffinity(0, {cpu})
            os.sched_setaffinity(0, whole)
            workers._pool.submit(time.sleep, 0).result()
            thread = workers._pool._threads[0].native_id
            assert thread is not None
            assert workers._pool._left in whole
            assert os.sched_getaffinity(thread) == whole - {workers._pool._left}
    finally:
        os.sched_setaffinity(0, whole)
    workers.close()
