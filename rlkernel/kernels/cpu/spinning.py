"""Threads that wait for their next kernel awake for a while, and take it without Python's lock.

A thread that sleeps is woken in 15 to 200 us (the more on virtual machines, whose idle processors halt), and one that
has to take Python's lock first waits for whoever holds it. The kernels of a model follow each other faster than that.
So a worker listens for a while after each kernel, outside Python: at a counter, which says that there is something in
its queue, and at a box of its own, into which a compiled caller puts a job: the address of a C function that takes
fields of int64. It keeps its processor for a moment, and then leaves it between two looks to whoever wants it.

A box is a row of int64: its state, the job's address, the job's fields. Only its worker leaves ``LISTENING`` for
``ASLEEP``, and runs what is ``POSTED``; only a caller claims, posts, and gives a box that is ``DONE`` back.
"""

from __future__ import annotations

import platform
import time
from functools import cache
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import carray, int64, types
from numba.extending import intrinsic

from rlkernel.kernels.cpu.jit import device_function, kernel

WAIT_S = 200e-6
"""How long a thread listens without leaving its processor to others."""
PATIENCE_NS = 5_000_000
"""How long after that it goes on, leaving its processor after every look to any thread that wants it."""
STATE, JOB, FIELDS, BOX_WORDS = 0, 1, 2, 40
ASLEEP, LISTENING, CLAIMED, POSTED, DONE = range(5)
_PAUSES: dict[str, tuple[str, list[ir.Constant]]] = {
    "x86_64": ("llvm.x86.sse2.pause", []),
    "AMD64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.hint", [ir.Constant(ir.IntType(32), 1)]),
    "arm64": ("llvm.aarch64.hint", [ir.Constant(ir.IntType(32), 1)]),
}
_WORD = ir.IntType(64)
_TRIED = 2000


def _is_words(array: Any) -> bool:
    return isinstance(array, types.Array) and array.dtype == types.int64 and array.ndim == 1 and array.layout == "C"


def _place(context: Any, builder: Any, signature: Any, arguments: Any, index: Any) -> Any:
    """Pointer to an element of the first argument."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [index])


@intrinsic
def look(typing_context, words, index):  # type: ignore[no-untyped-def]
    """``words[index]`` as another thread wrote it last, with all that it wrote before; after a short pause."""
    del typing_context
    if not _is_words(words):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in _PAUSES:
            name, given = _PAUSES[platform.machine()]
            kind = ir.FunctionType(ir.VoidType(), [constant.type for constant in given])
            known = builder.module.globals.get(name)
            builder.call(known if known is not None else ir.Function(builder.module, kind, name), given)
        return builder.load_atomic(_place(context, builder, signature, arguments, arguments[1]), "acquire", 8)

    return types.int64(words, types.int64), codegen


@intrinsic
def publish(typing_context, words, index, value):  # type: ignore[no-untyped-def]
    """``words[index] = value``, for others to see with all that was written before."""
    del typing_context
    if not _is_words(words):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments, arguments[1])
        builder.store_atomic(arguments[2], place, "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), codegen


@intrinsic
def exchange(typing_context, words, index, expected, value):  # type: ignore[no-untyped-def]
    """``words[index] = value`` if it is ``expected``, in one step; whether it was."""
    del typing_context
    if not _is_words(words):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments, arguments[1])
        found = builder.cmpxchg(place, arguments[2], arguments[3], "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return types.boolean(words, types.int64, types.int64, types.int64), codegen


@intrinsic
def take(typing_context, words, index, count):  # type: ignore[no-untyped-def]
    """Add ``count`` to ``words[index]`` in one step; what it was before."""
    del typing_context
    if not _is_words(words):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments, arguments[1])
        return builder.atomic_rmw("add", place, arguments[2], "acq_rel")

    return types.int64(words, types.int64, types.int64), codegen


@intrinsic
def _call(typing_context, words, address, index):  # type: ignore[no-untyped-def]
    """Call the C function at ``words[address]`` with a pointer to ``words[index]``."""
    del typing_context
    if not _is_words(words):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD.as_pointer()]).as_pointer()
        where = builder.load(_place(context, builder, signature, arguments, arguments[1]))
        fields = _place(context, builder, signature, arguments, arguments[2])
        builder.call(builder.inttoptr(where, kind), [fields])
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), codegen


def _c_library(builder: Any, name: str, answers: Any, *takes: Any) -> Any:
    """A function of the C library."""
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, ir.FunctionType(answers, takes), name)


@intrinsic
def nanoseconds(typing_context):  # type: ignore[no-untyped-def]
    """The monotonic clock."""
    del typing_context

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            time_spec = builder.alloca(_WORD, size=2)
        function = _c_library(builder, "clock_gettime", ir.IntType(32), ir.IntType(32), _WORD.as_pointer())
        builder.call(function, [ir.Constant(ir.IntType(32), time.CLOCK_MONOTONIC), time_spec])
        seconds = builder.load(time_spec)
        rest = builder.load(builder.gep(time_spec, [ir.Constant(ir.IntType(32), 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(_WORD, 1_000_000_000)), rest)

    return types.int64(), codegen


@intrinsic
def _leave_processor(typing_context):  # type: ignore[no-untyped-def]
    """Let another thread that is ready run first."""
    del typing_context

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(_c_library(builder, "sched_yield", ir.IntType(32)), [])
        return context.get_dummy_value()

    return types.void(), codegen


@kernel
def listen(box, posted, seen, turns, patience, told):
    """Run jobs that are put into the box until ``posted[0]`` is not ``seen``, or nothing was found for long enough.

    That is ``turns`` looks, and ``patience`` nanoseconds of looks between which the processor is left to others.
    Adds one to every element of ``told`` first: whoever waits for that finds Python's lock free. A box without words
    takes no jobs.
    """
    for i in range(len(told)):
        publish(told, i, told[i] + 1)
    takes = len(box) > 0 and turns > 0
    if takes:
        publish(box, STATE, LISTENING)
    left, end = turns, int64(0)
    while True:
        if takes:
            state = look(box, STATE)
            if state == POSTED:
                _call(box, JOB, FIELDS)
                publish(box, STATE, DONE)
                left, end = turns, int64(0)
                continue
            if state != LISTENING:
                continue  # a caller is at it
        left -= 1
        over = look(posted, 0) != seen
        if left < 0 and not over:
            now = nanoseconds() if patience > 0 else int64(0)
            if end == 0:
                end = now + patience
            over = now >= end
            if not over:
                _leave_processor()
        if over and (not takes or exchange(box, STATE, LISTENING, ASLEEP)):
            break


@intrinsic
def _pointer_at(typing_context, address, kind):  # type: ignore[no-untyped-def]
    """The pointer that an int64 is the address of, to elements of the type of ``kind``."""
    del typing_context

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(address, kind), codegen


@device_function
def put_array(box, field, array):
    """Write address and size of a flat array into two fields; its owner keeps it until the job is done."""
    box[FIELDS + field] = array.ctypes.data
    box[FIELDS + field + 1] = array.size


@device_function
def array_at(fields, field, kind):
    """The flat array that :func:`put_array` wrote, of elements of the type of ``kind``."""
    return carray(_pointer_at(fields[field], kind), (fields[field + 1],))  # type: ignore[call-overload]


@device_function
def post(box, job):
    """Hand a claimed box's worker its job; the fields are written."""
    box[JOB] = job
    publish(box, STATE, POSTED)


@device_function
def claim(box):
    """Whether the box's worker was listening, and now waits for a job of this caller."""
    return exchange(box, STATE, LISTENING, CLAIMED)


@device_function
def collect(box):
    """Wait until the job in the box is done; its worker listens again."""
    while look(box, STATE) != DONE:
        pass
    publish(box, STATE, LISTENING)


@cache
def turns_of_a_wait() -> int:
    """Looks that take :data:`WAIT_S` on this machine."""
    none, words = np.zeros(0, np.int64), np.zeros(1, np.int64)
    listen(none, words, 0, 1, 0, none)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        listen(none, words, 0, _TRIED, 0, none)
        best = min(best, time.perf_counter() - start)
    return max(1, int(_TRIED * WAIT_S / best))
