"""Worker threads for the CPU kernels.

A kernel takes ``(first, last, *arguments)`` and computes the output items ``first <= i < last``. Work is
cut over *outputs* only, so that the number of threads cannot change a bit. Numba's own ``prange`` is not
used: its threading layers fail under two calling threads, and its scalar reductions depend on the count.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Barrier, Thread
from typing import Any

from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.primitives import rounds_to_nearest_even, subnormals_survive


def available_cpus() -> int:
    """Number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


class _Pending:
    """The answer of a function that another thread runs."""

    __slots__ = ("_answer",)

    def __init__(self) -> None:
        self._answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Called once, in the worker."""
        try:
            self._answer.put((function(*arguments), None))
        except BaseException as error:  # raised again in the thread that waits
            self._answer.put((None, error))

    def result(self) -> Any:
        """Wait for the value; called once. Raises what the function raised."""
        value, error = self._answer.get()
        if error is not None:
            raise error
        return value

    def error(self) -> BaseException | None:
        """Wait; what the function raised, if it did."""
        return self._answer.get()[1]


def _serve(tasks: SimpleQueue[Any]) -> None:
    while (task := tasks.get()) is not None:
        pending, function, arguments = task
        pending.run(function, arguments)
        del task, pending, function, arguments  # no array outlives its kernel here


def _end(tasks: SimpleQueue[Any], count: int) -> None:
    for _ in range(count):
        tasks.put(None)


class ThreadPool:
    """Threads that take functions from one queue; half the latency of an executor of ``concurrent.futures``."""

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        for i in range(count):
            Thread(target=_serve, args=(self._tasks,), name=f"rlkernel_{i}", daemon=True).start()
        self._close = weakref.finalize(self, _end, self._tasks, count)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> _Pending:
        """Queue a call. Raises RuntimeError after :meth:`close`."""
        if not self._close.alive:
            raise RuntimeError("these worker threads were closed; no kernel can run in them")
        pending = _Pending()
        self._tasks.put((pending, function, arguments))
        return pending

    def close(self) -> None:
        """Let the threads end when they have done what is queued."""
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
        self._pool = ThreadPool(self.count - 1) if self.count > 1 else None
        self.probe()

    def probe(self) -> None:
        """Check in the calling thread and in every worker that subnormals survive and sums round to nearest even."""
        own = _changed_arithmetic()
        if own is not None:
            raise NumericsError(f"this thread {own[0]}; {own[2]}")
        if self._pool is None:
            return
        barrier = Barrier(self.count - 1)

        def check() -> tuple[str, str, str] | None:
            barrier.wait(timeout=60)
            return _changed_arithmetic()

        results = [f.result() for f in [self._pool.submit(check) for _ in range(self.count - 1)]]
        changed = [result for result in results if result is not None]
        if changed:
            _, does, remedy = changed[0]
            raise NumericsError(
                f"{len(changed)} of {self.count - 1} worker threads {does}; {remedy} before the workers start"
            )

    def run(self, kernel: Callable[..., Any], items: int, *arguments: Any, grain: int = 1) -> None:
        """Run ``kernel(first, last, *arguments)`` over ``0..items``; a thread gets at least ``grain`` items."""
        parts = min(self.count, max(1, items // max(1, grain)))
        if parts == 1 or self._pool is None:
            kernel(0, items, *arguments)
            return
        bounds = [items * i // parts for i in range(parts + 1)]
        others = [self._pool.submit(kernel, bounds[i], bounds[i + 1], *arguments) for i in range(1, parts)]
        try:
            kernel(bounds[0], bounds[1], *arguments)
        finally:  # an error leaves this call only when nobody writes to the arrays any more
            errors = [error for error in [other.error() for other in others] if error is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.close()
