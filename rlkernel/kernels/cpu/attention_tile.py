"""Register tiles of attention: continued fp32 FMA chains over the depth, vectors over the columns.

A tile computes ``c[r, n] = fma(a[r, k], b[k, n], c[r, n])`` for k ascending. Every element is one chain, so
its bits do not depend on how rows and columns are cut into tiles: their sizes are tuning and follow the vector
registers of this CPU. Unlike the micro-kernel of the GEMM, operands keep their strides (nothing is packed), and
tiles one vector wide serve what is left of keys and head dimension. The loops are emitted as LLVM vector code,
because whether LLVM's own vectoriser finds them depends on its version.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numba
import numba.extending
from numba import types
from numba.core import cgutils

from rlkernel.kernels.cpu.microkernel import LANES, MAX_ROWS, VECTORS

# Numba's annotation counts the typing context among the arguments of a call
intrinsic: Any = numba.extending.intrinsic

COLUMNS = LANES * VECTORS

KEY_BLOCK = 64  # keys that share one online maximum: contractual, whatever the tiles above are

_FLOAT = ir.FloatType()
_INDEX = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


@intrinsic
def element_address(typing_context: Any, array: Any, index: Any) -> Any:
    """Address (int64) of element ``index`` counted from the first one of a C-contiguous float32 array."""
    if not isinstance(array, types.Array) or array.dtype != types.float32 or array.layout != "C":
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(builder.gep(view.data, [arguments[1]]), _INDEX)

    return types.int64(array, types.int64), codegen


def _vector_pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _VECTOR.as_pointer())


def _vector_operation(builder: Any, name: str, result: Any, operands: int) -> Any:
    # llvmlite's own declare_intrinsic and builder.fma do not know vectors
    function = ir.FunctionType(result, [_VECTOR] * operands)
    return cgutils.get_or_insert_function(builder.module, function, f"{name}.v{LANES}f32")


def _emit_tile(builder: Any, rows: int, vectors: int, arguments: Any) -> None:
    a, a_row, a_depth, b, b_depth, c, c_row, depth, fresh = arguments

    def constant(value: int) -> Any:
        return ir.Constant(_INDEX, value)

    def scaled(value: Any) -> Any:
        return builder.mul(value, constant(4))

    a_row, a_depth, b_depth, c_row = scaled(a_row), scaled(a_depth), scaled(b_depth), scaled(c_row)
    a_rows = [builder.add(a, builder.mul(a_row, constant(r))) for r in range(rows)]
    c_addresses = [
        builder.add(builder.add(c, builder.mul(c_row, constant(r))), constant(4 * LANES * v))
        for r in range(rows)
        for v in range(vectors)
    ]
    start = builder.block
    load = builder.append_basic_block("tile_load")
    head = builder.append_basic_block("tile_head")
    body = builder.append_basic_block("tile_body")
    end = builder.append_basic_block("tile_end")
    builder.cbranch(builder.icmp_signed("!=", fresh, constant(0)), head, load)

    builder.position_at_end(load)
    loaded = [builder.load(_vector_pointer(builder, address), align=4) for address in c_addresses]
    builder.branch(head)

    builder.position_at_end(head)
    zero = ir.Constant(_VECTOR, [ir.Constant(_FLOAT, 0.0)] * LANES)
    sums = []
    for value in loaded:
        phi = builder.phi(_VECTOR)
        phi.add_incoming(zero, start)
        phi.add_incoming(value, load)
        sums.append(phi)
    counters = []
    for first in (constant(0), b, constant(0)):
        phi = builder.phi(_INDEX)
        phi.add_incoming(first, start)
        phi.add_incoming(first, load)
        counters.append(phi)
    k, b_address, a_offset = counters
    builder.cbranch(builder.icmp_signed("<", k, depth), body, end)

    builder.position_at_end(body)
    columns = [
        builder.load(_vector_pointer(builder, builder.add(b_address, constant(4 * LANES * v))), align=4)
        for v in range(vectors)
    ]
    fma = _vector_operation(builder, "llvm.fma", _VECTOR, 3)
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    results = []
    for r in range(rows):
        pointer = builder.inttoptr(builder.add(a_rows[r], a_offset), _FLOAT.as_pointer())
        one = builder.insert_element(undefined, builder.load(pointer, align=4), ir.Constant(ir.IntType(32), 0))
        value = builder.shuffle_vector(one, undefined, zeros)
        results += [builder.call(fma, (value, columns[v], sums[r * vectors + v])) for v in range(vectors)]
    for phi, result in zip(sums, results, strict=True):
        phi.add_incoming(result, body)
    k.add_incoming(builder.add(k, constant(1)), body)
    b_address.add_incoming(builder.add(b_address, b_depth), body)
    a_offset.add_incoming(builder.add(a_offset, a_depth), body)
    builder.branch(head)

    builder.position_at_end(end)
    for phi, address in zip(sums, c_addresses, strict=True):
        builder.store(phi, _vector_pointer(builder, address), align=4)


@intrinsic
def _tile(
    typing_context: Any,
    variant: Any,
    a: Any,
    a_row: Any,
    a_depth: Any,
    b: Any,
    b_depth: Any,
    c: Any,
    c_row: Any,
    depth: Any,
    fresh: Any,
) -> Any:
    """Every tile, behind one switch. Variant ``2 * rows + wide``: a wide tile has VECTORS vectors a row, else one."""
    arguments = (variant, a, a_row, a_depth, b, b_depth, c, c_row, depth, fresh)
    if any(argument != types.int64 for argument in arguments):
        return None

    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        # one copy in a kernel, not one at each call: compile time
        builder.function.attributes.add("noinline")
        done = builder.append_basic_block("tiles_done")
        switch = builder.switch(values[0], done)
        for rows in range(1, MAX_ROWS + 1):
            for wide in (0, 1):
                block = builder.append_basic_block(f"tile_{rows}_{wide}")
                switch.add_case(ir.Constant(_INDEX, 2 * rows + wide), block)
                builder.position_at_end(block)
                _emit_tile(builder, rows, VECTORS if wide else 1, values[1:])
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*arguments), codegen


@numba.njit(nogil=True, error_model="numpy", fastmath=False, forceinline=False)
def chain_block(rows, columns, a, a_row, a_depth, b, b_depth, c, c_row, depth, fresh):
    """``c[r, n]`` continues (from +0 if ``fresh``) the chain over k of ``fma(a[r, k], b[k, n], c[r, n])``.

    All arguments are int64. ``a``, ``b``, ``c`` are addresses of float32 elements, the strides count elements:
    ``a[r, k]`` lies at ``a + 4 * (r * a_row + k * a_depth)``; columns of b and c are contiguous. ``columns`` is
    rounded up to whole vectors of LANES: b and c must have room for them.
    """
    for row in range(0, rows, MAX_ROWS):
        height = min(MAX_ROWS, rows - row)
        a_first = a + 4 * row * a_row
        c_first = c + 4 * row * c_row
        column = 0
        while column + COLUMNS <= columns:
            _tile(
                2 * height + 1,
                a_first,
                a_row,
                a_depth,
                b + 4 * column,
                b_depth,
                c_first + 4 * column,
                c_row,
                depth,
                fresh,
            )
            column += COLUMNS
        while column < columns:
            _tile(
                2 * height, a_first, a_row, a_depth, b + 4 * column, b_depth, c_first + 4 * column, c_row, depth, fresh
            )
            column += LANES


@numba.njit(nogil=True, error_model="numpy", fastmath=False, forceinline=False)
def chain_lower(rows, group, first, limit, columns, a, a_row, b, b_depth, c, c_row):
    """:func:`chain_block` where row r takes part only for ``k < min(first + r // group, limit)``.

    The chains are continued and ``a_depth`` is 1. What all rows of a tile see is shared; the rest is walked group
    by group. No row ever multiplies a value that it may not depend on: a zero weight would not do (0 * NaN is NaN).
    """
    for row in range(0, rows, MAX_ROWS):
        height = min(MAX_ROWS, rows - row)
        shared = min(limit, first + row // group)
        chain_block(height, columns, a + 4 * row * a_row, a_row, 1, b, b_depth, c + 4 * row * c_row, c_row, shared, 0)
        part = row
        while part < row + height and shared < limit:
            until = min((part // group + 1) * group, row + height)
            depth = min(limit, first + part // group) - shared
            if depth > 0:
                a_part, c_part = a + 4 * (part * a_row + shared), c + 4 * part * c_row
                chain_block(
                    until - part, columns, a_part, a_row, 1, b + 4 * shared * b_depth, b_depth, c_part, c_row, depth, 0
                )
            part = until


@numba.njit(nogil=True, error_model="numpy", fastmath=False, forceinline=False)
def chain_upper(rows, columns, a, a_row, a_depth, b, b_depth, c, c_row, depth):
    """:func:`chain_block` where row r takes part only for ``k >= r`` (continued; ``rows <= depth``)."""
    for row in range(0, rows, MAX_ROWS):
        height = min(MAX_ROWS, rows - row)
        shared = row + height - 1
        for part in range(row, shared):
            a_part, c_part = a + 4 * (part * a_row + part * a_depth), c + 4 * part * c_row
            chain_block(
                1, columns, a_part, a_row, a_depth, b + 4 * part * b_depth, b_depth, c_part, c_row, shared - part, 0
            )
        a_part, c_part = a + 4 * (row * a_row + shared * a_depth), c + 4 * row * c_row
        b_part = b + 4 * shared * b_depth
        chain_block(height, columns, a_part, a_row, a_depth, b_part, b_depth, c_part, c_row, depth - shared, 0)


@intrinsic
def block_maximum(typing_context: Any, address: Any) -> Any:
    """The contract's ``max`` over the KEY_BLOCK float32 at ``address`` (NaN if any is NaN; +0 over -0; any order)."""
    if address != types.int64:
        return None

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = [
            builder.load(_vector_pointer(builder, builder.add(arguments[0], ir.Constant(_INDEX, 4 * at))), align=4)
            for at in range(0, KEY_BLOCK, LANES)
        ]
        pairwise = _vector_operation(builder, "llvm.maximum", _VECTOR, 2)
        while len(values) > 1:
            values = [builder.call(pairwise, values[i : i + 2]) for i in range(0, len(values), 2)]
        reduce = _vector_operation(builder, "llvm.vector.reduce.fmaximum", _FLOAT, 1)
        return builder.call(reduce, values)

    return types.float32(address), codegen


def _copier(count: int) -> Any:
    @intrinsic
    def copy(typing_context: Any, source: Any, target: Any) -> Any:
        if source != types.int64 or target != types.int64:
            return None
        pointer = ir.VectorType(_FLOAT, count).as_pointer()

        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values = builder.load(builder.inttoptr(arguments[0], pointer), align=4)
            builder.store(values, builder.inttoptr(arguments[1], pointer), align=4)
            return context.get_dummy_value()

        return types.void(source, target), codegen

    return copy


# Copy so many float32 between addresses, all loads before the stores (LLVM cannot know that they do not overlap).
copy_eight, copy_sixteen = _copier(8), _copier(16)


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address; nothing happens where there is none."""
    if address != types.int64:
        return None

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.inttoptr(arguments[0], pointer)
        builder.call(function, [place, number(0), number(2), number(1)])  # read, second-level cache, data
        return context.get_dummy_value()

    return types.void(address), codegen
