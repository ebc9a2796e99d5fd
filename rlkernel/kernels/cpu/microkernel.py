"""The micro-kernel of the fp32 FMA-chain GEMM, written as LLVM IR with explicit vectors.

One call computes a tile of ``rows x PANEL_WIDTH`` outputs. Every output is one ascending chain over k,
``acc = fma(a[k], b[k], acc)``, held in one vector lane: no lane ever meets another, so the tile's shape, the
vector width of the CPU and the place where k is cut into calls change no bit (a float32 accumulator that is
stored and loaded again is the same float32). ``llvm.fma`` is the correctly rounded operation on every target;
the instructions carry no fast-math flags, so LLVM may neither reassociate nor contract.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_FLOAT = ir.FloatType()
_POINTER = _FLOAT.as_pointer()
_INT64 = ir.IntType(64)
_INT32 = ir.IntType(32)
_BOOL = ir.IntType(1)

MAX_ROWS = 6  # rows of a tile: 6 x 4 accumulators, 4 vectors of b and a broadcast fit 32 registers (6 x 2: 16)
_CACHE_LINE = 16  # float32 in 64 bytes
PAIR_ROWS = 2  # so few rows are bound by the memory, and stream two panels at once
_PREFETCH_DISTANCE = 16  # k-steps ahead; only for tiles of few rows


def vector_shape(features: str) -> tuple[int, int]:
    """``(lanes of a vector, vectors a panel is wide)`` for an LLVM feature string (``+avx2,-avx512f``)."""
    enabled = set(features.split(","))
    if "+avx512f" in enabled:
        return 16, 4
    if "+avx" in enabled:
        return 8, 2
    return 4, 4  # NEON and the like: 128-bit vectors, 32 registers


def _compiled_features() -> str:
    """The features that Numba compiles for: this host's, unless Numba is configured otherwise."""
    return str(cpu_target.target_context.codegen().magic_tuple()[2])


LANES, VECTORS = vector_shape(_compiled_features())
PANEL_WIDTH = LANES * VECTORS


def _declare(module: ir.Module, name: str, function_type: ir.FunctionType) -> ir.Function:
    existing = module.globals.get(name)
    return existing if existing is not None else ir.Function(module, function_type, name)


def _tile_function(module: ir.Module, rows: int, panels: int = 1) -> ir.Function:
    """``void tile(a, a_row, a_k, b, b_panel, c, c_row, depth, continued)``: strides in elements.

    b is ``[depth][PANEL_WIDTH]``, and its next panel lies ``b_panel`` elements behind.
    """
    name = f"rlkernel_fma_tile_{rows}x{panels}x{VECTORS}x{LANES}"
    existing = module.globals.get(name)
    if existing is not None:
        return existing
    strides = [_POINTER, _INT64, _INT64, _POINTER, _INT64, _POINTER, _INT64, _INT64, _BOOL]
    signature = ir.FunctionType(ir.VoidType(), strides)
    function = ir.Function(module, signature, name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")  # registers are then allocated for this loop alone
    a, a_row, a_k, b, b_panel, c, c_row, depth, continued = function.args

    vector = ir.VectorType(_FLOAT, LANES)
    fma_type = ir.FunctionType(vector, [vector, vector, vector])
    fma = _declare(module, f"llvm.fma.v{LANES}f32", fma_type)
    prefetch_type = ir.FunctionType(ir.VoidType(), [_POINTER, _INT32, _INT32, _INT32])
    prefetch = _declare(module, "llvm.prefetch.p0", prefetch_type)

    entry = function.append_basic_block("entry")
    load_c = function.append_basic_block("load_c")
    head = function.append_basic_block("head")
    body = function.append_basic_block("body")
    done = function.append_basic_block("done")
    builder = ir.IRBuilder(entry)

    def at(pointer: Any, *offsets: Any) -> Any:
        for offset in offsets:
            pointer = builder.gep(pointer, [offset])
        return pointer

    def constant(value: int) -> ir.Constant:
        return ir.Constant(_INT64, value)

    def vector_at(pointer: Any) -> Any:
        return builder.bitcast(pointer, vector.as_pointer())

    tile = [(r, v) for r in range(rows) for v in range(panels * VECTORS)]
    a_rows = [at(a, builder.mul(a_row, constant(r))) for r in range(rows)]
    c_tile = {(r, v): at(c, builder.mul(c_row, constant(r)), constant(v * LANES)) for r, v in tile}
    zero = ir.Constant(vector, [0.0] * LANES)
    builder.cbranch(continued, load_c, head)

    builder.position_at_end(load_c)
    started = {at_: builder.load(vector_at(c_tile[at_]), align=4) for at_ in tile}
    builder.branch(head)

    builder.position_at_end(head)
    k = builder.phi(_INT64)
    a_offset = builder.phi(_INT64)
    sums = {at_: builder.phi(vector) for at_ in tile}
    for phi, start in [(k, constant(0)), (a_offset, constant(0))]:
        phi.add_incoming(start, entry)
        phi.add_incoming(start, load_c)
    for at_ in tile:
        sums[at_].add_incoming(zero, entry)
        sums[at_].add_incoming(started[at_], load_c)
    builder.cbranch(builder.icmp_signed("<", k, depth), body, done)

    builder.position_at_end(body)
    b_vectors = []
    for panel in range(panels):
        b_row = at(b, builder.mul(k, constant(PANEL_WIDTH)), builder.mul(b_panel, constant(panel)))
        for line in range(0, PANEL_WIDTH if rows <= PAIR_ROWS else 0, _CACHE_LINE):
            ahead = at(b_row, constant(_PREFETCH_DISTANCE * PANEL_WIDTH + line))
            # read, keep in all caches, data
            builder.call(prefetch, [ahead, ir.Constant(_INT32, 0), ir.Constant(_INT32, 3), ir.Constant(_INT32, 1)])
        b_vectors += [builder.load(vector_at(at(b_row, constant(v * LANES))), align=4) for v in range(VECTORS)]
    lane_zeros = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    for r in range(rows):
        element = builder.load(at(a_rows[r], a_offset))
        single = builder.insert_element(ir.Constant(vector, ir.Undefined), element, ir.Constant(_INT32, 0))
        broadcast = builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), lane_zeros)
        for v in range(panels * VECTORS):
            following = builder.call(fma, [broadcast, b_vectors[v], sums[r, v]])
            sums[r, v].add_incoming(following, body)
    k.add_incoming(builder.add(k, constant(1)), body)
    a_offset.add_incoming(builder.add(a_offset, a_k), body)
    builder.branch(head)

    builder.position_at_end(done)
    for at_ in tile:
        builder.store(sums[at_], vector_at(c_tile[at_]), align=4)
    builder.ret_void()
    return function


def _is_float32_vector(array: Any) -> bool:
    return isinstance(array, types.Array) and array.dtype == types.float32 and array.ndim == 1 and array.layout == "C"


def _emit_tile(context: Any, builder: Any, signature: Any, arguments: Any, panels: int, most: int) -> Any:
    """Calls of the tile functions of 1 to ``most`` rows; the arguments are those of :func:`fma_pair`."""
    rows, a, a_start, a_row, a_k, b, b_start, b_panel, c, c_start, c_row, depth, continued = arguments

    def pointer(position: int, value: Any, start: Any) -> Any:
        array = context.make_array(signature.args[position])(context, builder, value)
        return builder.gep(array.data, [start])

    call = [pointer(1, a, a_start), a_row, a_k, pointer(5, b, b_start), b_panel, pointer(8, c, c_start), c_row, depth]
    call.append(builder.trunc(continued, _BOOL) if continued.type != _BOOL else continued)
    after = builder.append_basic_block("tile_done")
    switch = builder.switch(rows, after)
    for count in range(1, most + 1):
        block = builder.append_basic_block(f"tile_{count}")
        switch.add_case(ir.Constant(_INT64, count), block)
        with builder.goto_block(block):
            builder.call(_tile_function(builder.module, count, panels), call)
            builder.branch(after)
    builder.position_at_end(after)
    return context.get_dummy_value()


def _tile_signature(a: Any, b: Any, c: Any) -> Any:
    integer = types.int64
    return types.void(
        integer, a, integer, integer, integer, b, integer, integer, c, integer, integer, integer, types.boolean
    )


@intrinsic
def fma_tile(  # type: ignore[no-untyped-def]
    typing_context, rows, a, a_start, a_row, a_k, b, b_start, b_panel, c, c_start, c_row, depth, continued
):
    """``c[r, j] = chain over k < depth of (a[r, k], b[k, j])`` for ``rows`` (1..MAX_ROWS) rows and a panel's columns.

    ``a``, ``b``, ``c`` are flat C-contiguous float32 arrays; the starts and strides are int64, in elements;
    ``b`` has row stride PANEL_WIDTH, and ``b_panel`` is not used. ``continued``: chains start from what is in c, else
    from +0. Bounds are the caller's duty: PANEL_WIDTH columns of c are written.
    """
    del typing_context
    if not all(_is_float32_vector(array) for array in (a, b, c)):
        return None
    return _tile_signature(a, b, c), lambda *given: _emit_tile(*given, 1, MAX_ROWS)


@intrinsic
def fma_pair(  # type: ignore[no-untyped-def]
    typing_context, rows, a, a_start, a_row, a_k, b, b_start, b_panel, c, c_start, c_row, depth, continued
):
    """:func:`fma_tile` for 1..PAIR_ROWS rows and two panels, ``b_panel`` elements apart, 2 * PANEL_WIDTH columns."""
    del typing_context
    if not all(_is_float32_vector(array) for array in (a, b, c)):
        return None
    return _tile_signature(a, b, c), lambda *given: _emit_tile(*given, 2, PAIR_ROWS)


@intrinsic
def copy_panel_row(typing_context, source, source_start, target, target_start):  # type: ignore[no-untyped-def]
    """Copy PANEL_WIDTH elements between flat arrays: float32, or uint16 holding bfloat16 bits, to float32 (exact)."""
    del typing_context
    widen = isinstance(source, types.Array) and source.dtype == types.uint16 and source.ndim == 1
    if not _is_float32_vector(target) or not (widen or _is_float32_vector(source)):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        read = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        write = context.make_array(signature.args[2])(context, builder, arguments[2]).data
        vector = ir.VectorType(_FLOAT, LANES)
        words = ir.VectorType(_INT32, LANES)
        loaded = ir.VectorType(ir.IntType(16), LANES) if widen else vector
        for v in range(VECTORS):
            offset = ir.Constant(_INT64, v * LANES)
            place = builder.gep(read, [builder.add(arguments[1], offset)])
            value = builder.load(builder.bitcast(place, loaded.as_pointer()), align=2 if widen else 4)
            if widen:
                shifted = builder.shl(builder.zext(value, words), ir.Constant(words, [16] * LANES))
                value = builder.bitcast(shifted, vector)
            place = builder.gep(write, [builder.add(arguments[3], offset)])
            builder.store(value, builder.bitcast(place, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), codegen
