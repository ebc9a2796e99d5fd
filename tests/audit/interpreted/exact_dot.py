"""Gives Triton's interpreter the contract's matrix product: ascending fp32 FMA chains in place of NumPy's ``matmul``.

With it the interpreter's bits in float32 are those of the ``portable`` profile, whole models included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from rlkernel.kernels.cpu.primitives import fma
from rlkernel.kernels.triton import launch_chains


@numba.njit
def _chains(x: Any, y: Any, total: Any) -> None:
    for m in range(x.shape[0]):
        for k in range(x.shape[1]):
            for n in range(y.shape[1]):
                total[m, n] = fma(x[m, k], y[k, n], total[m, n])


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    x, y = (np.ascontiguousarray(handle.data, np.float32) for handle in (a, b))
    total = np.array(d.data, np.float32)
    if total.ndim != 2:
        raise NotImplementedError("products of matrices only")
    _chains(x, y, total)
    return TensorHandle(total, d.dtype.scalar)


@contextmanager
def exact_dot() -> Iterator[None]:
    """Inside: ``tl.dot`` of the interpreter is the FMA chain, and no kernel is chosen that copies in the background.

    Those are compiled by Gluon, which has no interpreter; the plain kernels of the same chains have.
    """
    before = InterpreterBuilder.create_dot, launch_chains.copies
    InterpreterBuilder.create_dot, launch_chains.copies = _dot, lambda *_: False
    try:
        yield
    finally:
        InterpreterBuilder.create_dot, launch_chains.copies = before
