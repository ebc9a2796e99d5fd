"""Arrays that begin on a cache line."""

from __future__ import annotations

import numpy as np
import pytest

from rlkernel.kernels.cpu import gemm, panels
from rlkernel.kernels.cpu.memory import aligned_empty, aligned_scratch, aligned_zeros
from rlkernel.kernels.cpu.threads import Workers


@pytest.mark.parametrize("shape", [5000, (1, 5000), (70, 3, 64), (2048, 1024)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float64])
def test_large_arrays_begin_on_a_line_and_have_memory_of_their_own(shape, dtype) -> None:
    arrays = [make(shape, dtype) for make in (aligned_empty, aligned_zeros) for _ in range(3)]
    for array in arrays:
        assert array.ctypes.data % 64 == 0
        assert array.shape == (shape if isinstance(shape, tuple) else (shape,)) and array.dtype == dtype
        assert array.flags.c_contiguous and array.flags.writeable
    assert not any(np.may_share_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    assert all(not array.any() for array in arrays[3:])


@pytest.mark.parametrize("shape", [0, (0, 7), 1, (3, 0, 2)])
def test_small_and_empty_arrays_have_their_shape(shape) -> None:
    wanted = shape if isinstance(shape, tuple) else (shape,)
    assert aligned_empty(shape).shape == wanted and aligned_zeros(shape).shape == wanted


def test_what_products_stream_is_aligned() -> None:
    workers = Workers(1)
    for pack in (panels.pack_rows, panels.pack_columns):
        packed = pack(np.ones((700, 300), np.float32), workers)
        assert packed.data.ctypes.data % 64 == 0 and packed.data[0].nbytes % 64 == 0
    assert gemm.matmul(np.ones((9, 300), np.float32), panels.pack_rows(np.ones((700, 300), np.float32), workers),
                       workers).ctypes.data % 64 == 0  # fmt: skip
    scratch = aligned_scratch(3, 1001)
    assert scratch.shape == (3, 1008) and all(row.ctypes.data % 64 == 0 for row in scratch)
