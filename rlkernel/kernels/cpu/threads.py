"""Worker threads for the CPU kernels.

A kernel takes ``(first, last, *arguments)`` and computes the output items ``first <= i < last``. Work is
cut over *outputs* only, so that the number of threads cannot change a bit. Numba's own ``prange`` is not
used: its threading layers fail under two calling threads, and its scalar reductions depend on the count.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Barrier, Lock, RLock, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.primitives import rounds_to_nearest_even, subnormals_survive
from rlkernel.kernels.cpu.spinning import (
    ASLEEP,
    BOX_WORDS,
    LISTENING,
    PATIENCE_NS,
    STATE,
    listen,
    turns_of_a_wait,
)

Words = NDArray[np.int64]
_NONE = np.zeros(0, np.int64)
_LOOKS_BETWEEN = 8  # jobs for threads that listen, between two looks at the processor of the caller


def _find_getcpu() -> Callable[[], int]:
    """The C library's ``sched_getcpu``; -1 always where there is none."""
    try:
        found: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return lambda: -1
    return found if hasattr(os, "sched_setaffinity") else lambda: -1


_current_cpu = _find_getcpu()


def available_cpus() -> int:
    """Number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


class _Pending:
    """The answer of a function that another thread runs."""

    __slots__ = ("_answer", "_bell", "finished")

    def __init__(self, bell: _Bell) -> None:
        self.finished = False
        self._answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._bell = bell

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Called once, in the worker."""
        value, found = None, None
        try:
            value = function(*arguments)
        except BaseException as error:  # raised again in the thread that waits
            found = error
        self.finished = True
        self._answer.put((value, found))

    def result(self) -> Any:
        """Wait for the value; called once. Raises what the function raised."""
        value, error = self._bell.wait_for(self._answer, _NONE, _NONE)
        if error is not None:
            raise error
        return value

    def error(self) -> BaseException | None:
        """Wait; what the function raised, if it did."""
        found: BaseException | None = self._bell.wait_for(self._answer, _NONE, _NONE)[1]
        return found

    def outlasted(self) -> BaseException | None:
        """:meth:`error`, waiting on when a signal's handler raises meanwhile; what that raised comes first."""
        raised: BaseException | None = None
        while True:
            try:
                error = self.error()
                return error if raised is None else raised
            except BaseException as interruption:
                raised = interruption
                if self.finished:
                    return raised


class _Bell:
    """Counts what was put into queues, so that whoever waits for the next can listen before it sleeps.

    The count is a hint: two that ring at once may count as one, and a wait that missed it sleeps until it is woken.
    """

    __slots__ = ("_turns", "count")

    def __init__(self, turns: int) -> None:
        self.count, self._turns = np.zeros(1, np.int64), turns

    @property
    def listens(self) -> bool:
        """Whether a wait looks before it sleeps."""
        return self._turns > 0

    def ring(self) -> None:
        """After something was put into a queue."""
        self.count[0] += 1

    def wait_for(self, queue: SimpleQueue[Any], told: Words, box: Words) -> Any:
        """Take from a queue, listening first and sleeping then until there is something.

        ``told`` is rung as soon as Python's lock is free; jobs that are put into the ``box`` meanwhile are run.
        """
        seen = int(self.count[0])
        turns = self._turns if queue.empty() else 0
        listen(box, self.count, seen, turns, PATIENCE_NS if turns else 0, told)
        return queue.get()


def _serve(tasks: SimpleQueue[Any], posted: _Bell, answered: _Bell, box: Words) -> None:
    while (task := posted.wait_for(tasks, answered.count, box)) is not None:
        pending, function, arguments = task
        pending.run(function, arguments)
        del task, pending, function, arguments  # no array outlives its kernel here


def _nothing() -> None:
    """What a thread does that is only to wake up."""


def _end(tasks: SimpleQueue[Any], posted: _Bell, count: int) -> None:
    for _ in range(count):
        tasks.put(None)
        posted.ring()


class ThreadPool:
    """Threads that take functions from one queue; half the latency of an executor of ``concurrent.futures``."""

    def __init__(self, count: int) -> None:
        # who looks needs a processor of his own: with fewer of them he would keep the others from their work
        turns = turns_of_a_wait() if count < available_cpus() else 0
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._posted, self._answered = _Bell(turns), _Bell(turns)
        self._boxes = np.zeros((count, BOX_WORDS), np.int64)
        self._words, self._asked = self._boxes.data, 0  # an element of it costs less than one of an array
        self._threads = [
            Thread(
                target=_serve,
                args=(self._tasks, self._posted, self._answered, self._boxes[i]),
                name=f"rlkernel_{i}",
                daemon=True,
            )
            for i in range(count)
        ]
        self._left, self._lock, self.forgotten = -1, RLock(), False
        self._close = weakref.finalize(self, _end, self._tasks, self._posted, count)
        for thread in self._threads:
            thread.start()  # where the system refuses one, those before it end with this pool
        _POOLS.add(self)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> _Pending:
        """Queue a call. Raises RuntimeError after :meth:`close`."""
        pending = _Pending(self._answered)
        self._keep_apart()
        with self._lock:  # nothing comes into the queue behind the marks of its end
            if not self._close.alive:
                raise RuntimeError("these worker threads were closed; no kernel can run in them")
            self._tasks.put((pending, function, arguments))
            self._posted.ring()
        return pending

    def listeners(self) -> Words | None:
        """The boxes of :mod:`rlkernel.kernels.cpu.spinning`, a row a thread, if any of the threads listens now."""
        for i in range(len(self._threads)):
            if self._words[i, STATE] == LISTENING:
                break
        else:
            return None
        self._asked += 1
        if self._asked % _LOOKS_BETWEEN == 0:
            self._keep_apart()
        return self._boxes

    def wake(self) -> None:
        """Let threads that sleep listen for a while; there are none in a closed pool, or where threads never listen."""
        if not self._posted.listens or not self._tasks.empty():
            return
        with suppress(RuntimeError):
            for _ in self._threads:
                self.submit(_nothing)

    def forget_threads(self) -> None:
        """None of the threads exists in this process."""
        self._boxes[:, STATE] = ASLEEP
        self._threads, self._lock, self.forgotten = [], RLock(), True

    def _keep_apart(self) -> None:
        """Let the threads run everywhere but where their caller does.

        The scheduler likes to wake a thread on the processor of whoever wakes it (on virtual machines also where
        another one idles), and needs many milliseconds to part them: meanwhile they wait for each other by turns.
        """
        cpu = _current_cpu()
        if cpu == self._left:
            return
        self._left = cpu
        elsewhere = os.sched_getaffinity(0) - {cpu}
        for thread in self._threads if elsewhere else ():
            if thread.native_id is not None:
                with suppress(OSError):  # it has ended
                    os.sched_setaffinity(thread.native_id, elsewhere)

    def close(self) -> None:
        """Let the threads end when they have done what is queued."""
        with self._lock:
            self._close()


def _changed_arithmetic() -> tuple[str, str, str] | None:
    """What the calling thread does that the contract does not (of one thread, of several), and the remedy."""
    if not subnormals_survive():
        what = "subnormal numbers to zero"
        remedy = "the contract keeps them: call torch.set_flush_denormal(False)"
        return f"flushes {what} (torch.set_flush_denormal(True)?)", f"flush {what}", remedy
    if not rounds_to_nearest_even():
        what = "not round to nearest even"
        remedy = "the contract does: some library changed the rounding mode (fesetround); set it back"
        return f"does {what}", f"do {what}", remedy
    return None


_POOLS: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


def _forget_threads() -> None:
    """In a forked child: threads are not copied, nobody would run a job that is put into their boxes."""
    for pool in _POOLS:
        pool.forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


class Workers:
    """A fixed set of threads (the caller is one of them) that run kernels over ranges of outputs.

    Every thread is probed for flushed subnormals and another rounding mode before the first kernel and whenever
    :meth:`probe` is called: ``torch.set_flush_denormal(True)`` or ``fesetround`` holds in Numba's code too.

    Raises:
        NumericsError: a thread flushes subnormal numbers to zero, or does not round to nearest even.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count if count is not None else available_cpus()
        if self.count < 1:
            raise ValueError(f"a worker count of {self.count} is not possible; 1 or more is")
        self._own_pool = ThreadPool(self.count - 1) if self.count > 1 else None
        self._probing = Lock()
        self.probe()

    @property
    def _pool(self) -> ThreadPool | None:
        """The other threads; a process that was forked has none of them, and computes alone."""
        return None if self._own_pool is None or self._own_pool.forgotten else self._own_pool

    def probe(self) -> None:
        """Check in the calling thread and in every worker that subnormals survive and sums round to nearest even."""
        own = _changed_arithmetic()
        if own is not None:
            raise NumericsError(f"this thread {own[0]}; {own[2]}")
        pool = self._pool
        if pool is None:
            return
        barrier = Barrier(self.count - 1)

        def check() -> tuple[str, str, str] | None:
            barrier.wait(timeout=60)
            return _changed_arithmetic()

        with self._probing:  # two that probe at once would wait at each other's barriers
            results = [f.result() for f in [pool.submit(check) for _ in range(self.count - 1)]]
        changed = [result for result in results if result is not None]
        if changed:
            _, does, remedy = changed[0]
            raise NumericsError(
                f"{len(changed)} of {self.count - 1} worker threads {does}; {remedy} before the workers start"
            )

    def run(self, kernel: Callable[..., Any], items: int, *arguments: Any, grain: int = 1) -> None:
        """Run ``kernel(first, last, *arguments)`` over ``0..items``; a thread gets at least ``grain`` items."""
        parts = min(self.count, max(1, items // max(1, grain)))
        pool = self._pool
        if parts == 1 or pool is None:
            kernel(0, items, *arguments)
            return
        bounds = [items * i // parts for i in range(parts + 1)]
        others: list[_Pending] = []
        try:
            for i in range(1, parts):
                others.append(pool.submit(kernel, bounds[i], bounds[i + 1], *arguments))
            kernel(bounds[0], bounds[1], *arguments)
        finally:  # an error leaves this call only when nobody writes to the arrays any more
            errors = [error for error in [other.outlasted() for other in others] if error is not None]
        if errors:
            raise errors[0]

    def listeners(self) -> Words | None:
        """Boxes for jobs of compiled callers, if threads listen that this caller can have; see :class:`ThreadPool`."""
        pool = self._pool
        return None if pool is None else pool.listeners()

    def wake(self) -> None:
        """Let the threads that sleep listen for a while."""
        pool = self._pool
        if pool is not None:
            pool.wake()

    def close(self) -> None:
        """End the threads."""
        pool = self._pool
        if pool is not None:
            pool.close()
