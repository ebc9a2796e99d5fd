"""Functions as a user might write them for ``vime admit --takes numpy``, each with one fault; ``FAULTS`` lists them."""

from __future__ import annotations

import numpy as np
import torch

from rlkernel.kernels.cpu import activation, gemm, norm
from rlkernel.kernels.cpu.panels import pack_rows
from rlkernel.kernels.cpu.threads import Workers

ONE = Workers(1)
CALLS = [0]


def product(x, weight, bias=None):
    panels = pack_rows(np.ascontiguousarray(weight), ONE)
    return gemm.matmul(np.ascontiguousarray(x), panels, ONE, bias=bias)


def rms(x, weight, eps):
    return norm.rms_norm(np.ascontiguousarray(x), weight, eps, ONE, False)


def silu_and_mul(gate, up):
    return activation.swiglu(np.ascontiguousarray(gate), np.ascontiguousarray(up), ONE, False)


def scaled(x, inverse, weight):
    with np.errstate(invalid="ignore"):
        return (x * inverse[:, None]) * weight


def inverse_root(mean, eps):
    return np.float32(1) / np.sqrt(mean + np.float32(eps))


def tf32(values):
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), values, rounded)


def cut(values):
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def flushed(values):
    return np.where(np.abs(values) < 2.0**-126, np.copysign(np.float32(0), values), values)


def bfloat16(values):
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).float().numpy()


def project(x, weight, *bias):
    return product(x, weight, *bias)


def project_tf32(x, weight):
    return product(tf32(x), tf32(weight))


def project_cut(x, weight):
    return product(cut(x), cut(weight))


def project_flushed(x, weight):
    return flushed(product(x, weight))


def project_flushed_operands(x, weight):
    return flushed(product(flushed(x), flushed(weight)))


def project_descending(x, weight):
    return product(x[:, ::-1], weight[:, ::-1])


def project_without_bias(x, weight, bias):
    return product(x, weight)


def project_plus_zero(x, weight):
    return product(x, weight) + np.float32(0)


def project_nan_rows_as_zero(x, weight):
    y = product(x, weight)
    y[np.isnan(x).any(axis=1)] = 0
    return y


def project_nan_over_tiles(x, weight):
    y = product(x, weight)
    for first in range(0, len(y), 4):
        if np.isnan(x[first : first + 4]).any():
            y[first : first + 4] = np.nan
    return y


def project_the_row_above(x, weight):
    return product(np.roll(x, 1, axis=0), weight)


def project_now_and_then(x, weight):
    CALLS[0] += 1
    return project_descending(x, weight) if CALLS[0] % 3 == 1 else product(x, weight)


def norm_with_epsilon(x, weight, eps):
    return rms(x, weight, 1e-5)[0]


def norm_with_odd_epsilon(x, weight, eps):
    return rms(x, weight, 2.5e-6)[0]


def norm_of_bfloat16_squares(x, weight, eps):
    with np.errstate(over="ignore"):
        total = bfloat16(bfloat16(x * x).sum(axis=1, dtype=np.float32))
    return scaled(x, inverse_root(total / np.float32(x.shape[1]), eps), weight)


def norm_added_in_bfloat16(x, weight, eps):
    total = np.zeros(len(x), np.float32)
    with np.errstate(over="ignore"):
        for k in range(x.shape[1]):
            total = bfloat16(total + x[:, k] * x[:, k])
    return scaled(x, inverse_root(total / np.float32(x.shape[1]), eps), weight)


def norm_of_float16_rows(x, weight, eps):
    """float16 in the middle of it, in an order of its own: no single change gives these bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = np.clip(x, -30000, 30000).astype(np.float16).astype(np.float32)
        mean = (half * half).sum(axis=1, dtype=np.float32) / np.float32(x.shape[1])
        mean = np.clip(mean, 0, 60000).astype(np.float16).astype(np.float32)
    return scaled(x, inverse_root(mean, eps), weight)


def norm_descending(x, weight, eps):
    total = np.zeros(len(x), np.float32)
    with np.errstate(over="ignore"):
        for k in reversed(range(x.shape[1])):
            total = (x[:, k].astype(np.float64) * x[:, k] + total).astype(np.float32)
    return scaled(x, inverse_root(total / np.float32(x.shape[1]), eps), weight)


def norm_of_the_row_above(x, weight, eps):
    return scaled(x, np.roll(rms(x, weight, eps)[1], 1), weight)


def norm_plus_zero(x, weight, eps):
    return rms(x, weight, eps)[0] + np.float32(0)


def norm_nan_rows_as_zero(x, weight, eps):
    y = rms(x, weight, eps)[0]
    y[np.isnan(x).any(axis=1)] = 0
    return y


def norm_infinite_mean_as_one(x, weight, eps):
    inverse = rms(x, weight, eps)[1]
    return scaled(x, np.where(inverse == 0, inverse_root(np.float32(1), eps), inverse), weight)


def norm_nan_over_tiles(x, weight, eps):
    y = rms(x, weight, eps)[0]
    for first in range(0, len(y), 4):
        if np.isnan(x[first : first + 4]).any():
            y[first : first + 4] = np.nan
    return y


def norm_flushed(x, weight, eps):
    return flushed(rms(x, weight, eps)[0])


def add_the_row_above(stream, branch):
    return stream + np.roll(branch, 1, axis=0)


def add_plus_zero(stream, branch):
    return stream + branch + np.float32(0)


def add_nan_rows_as_zero(stream, branch):
    with np.errstate(invalid="ignore"):
        y = stream + branch
    y[np.isnan(y).any(axis=1)] = 0
    return y


def add_now_and_then(stream, branch):
    CALLS[0] += 1
    with np.errstate(all="ignore"):
        y = stream + branch
        return np.nextafter(y, np.float32(np.inf)) if CALLS[0] % 2 else y


def add_batch_dependent_now_and_then(stream, branch):
    """Right among many rows, and wrong now and then alone: no matter of the batch."""
    CALLS[0] += 1
    with np.errstate(invalid="ignore"):
        y = stream + branch
    if len(y) == 1 and CALLS[0] % 2:
        y.view(np.uint32)[:] ^= 1
    return y


def swiglu_flushed(gate, up):
    return flushed(silu_and_mul(gate, up))


def swiglu_of_the_row_above(gate, up):
    return silu_and_mul(np.roll(gate, 1, axis=0), up)


NOT_DETERMINISTIC = r"it is not deterministic: [\d,]+ of [\d,]+ outputs differ between call 1 and call \d on the same"
NAN_AS_ZERO = "in rows with NaN they are not .* is 0 where the contract gives NaN"
FAULTS = [
    (project_tf32, "down_proj", "precision", "the bits are those of operands rounded to tf32"),
    (project_cut, "down_proj", "precision", "the bits are those of operands cut to tf32"),
    (project_flushed, "down_proj", "primitives", "subnormal results that are flushed to zero"),
    (project_flushed_operands, "down_proj", "primitives", "subnormal operands and results that are flushed to zero"),
    (project_descending, "down_proj", "merge order", "the bits are those of a chain in descending order"),
    (project_plus_zero, "down_proj", "primitives", r"a result of -0 that becomes \+0"),
    (project_nan_rows_as_zero, "down_proj", "primitives", NAN_AS_ZERO),
    (project_nan_over_tiles, "down_proj", "dependency", r"mlp_out\[1, 0\] changes where row 0 of input 0 is NaN, on"),
    (project_the_row_above, "down_proj", "dependency",
     "row 0 of mlp_out does not change with row 0 of input 0, on which it has to depend; row 1 of mlp_out does"),
    (project_now_and_then, "down_proj", None, NOT_DETERMINISTIC),
    (project_without_bias, "qkv_proj", "dependency",
     r"of q\w* does not change with model.layers.0.self_attn.q_proj.bias, on which it has to depend$"),
    (norm_with_epsilon, "rms_norm", "primitives", r"those of an epsilon of 1e-05 \(the contract's is 1e-06"),
    (norm_with_odd_epsilon, "rms_norm", "primitives", "the bits are those of an epsilon of 2.5e-06"),
    (norm_of_bfloat16_squares, "rms_norm", "precision", "squares rounded to bfloat16 before they are added, and their"),
    (norm_added_in_bfloat16, "rms_norm", "precision", "squares added one after the other in bfloat16"),
    (norm_of_float16_rows, "rms_norm", "precision", "no single change .* in a format narrower than float32"),
    (norm_descending, "rms_norm", "merge order", "one chain over the row in descending order"),
    (norm_of_the_row_above, "rms_norm", "dependency", "row 1 of attention_in changes with row 0 of input 0, on"),
    (norm_plus_zero, "rms_norm", "primitives", r"a result of -0 that becomes \+0"),
    (norm_nan_rows_as_zero, "rms_norm", "primitives", NAN_AS_ZERO),
    (norm_infinite_mean_as_one, "rms_norm", "primitives", "in rows with infinities they are not"),
    (norm_nan_over_tiles, "rms_norm", "dependency", r"attention_in\[1, 0\] changes where row 0 of input 0 is NaN, on"),
    (norm_flushed, "rms_norm", "primitives", "subnormal results that are flushed to zero"),
    (add_the_row_above, "residual_add", "dependency", "does not change with row 0 of input 1, on which it has"),
    (add_plus_zero, "residual_add", "primitives", r"a result of -0 that becomes \+0"),
    (add_nan_rows_as_zero, "residual_add", "dependency", r"stream\[0, 1\] changes where column 0 of input 0 is NaN"),
    (add_now_and_then, "residual_add", None, NOT_DETERMINISTIC),
    (add_batch_dependent_now_and_then, "residual_add", None, NOT_DETERMINISTIC),
    (swiglu_flushed, "swiglu", "primitives", "subnormal results that are flushed to zero"),
    (swiglu_of_the_row_above, "swiglu", "dependency", "does not change with row 0 of input 0"),
]  # fmt: skip
"""(function, region, the point that has to be named or None, what the sentence has to say)."""
