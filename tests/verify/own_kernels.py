"""Functions as a user would write them for ``vime admit --takes numpy``: every region, forward and backward, right."""

from __future__ import annotations

import numpy as np

from rlkernel.contract.hostscalars import attention_scales
from rlkernel.kernels.cpu import activation, attention, attention_backward, embedding, gemm, logprob, norm, rope
from rlkernel.kernels.cpu.gemm_gradient import weight_gradient
from rlkernel.kernels.cpu.panels import pack_columns, pack_rows
from rlkernel.kernels.cpu.threads import Workers

ONE = Workers(1)


def embed(table, ids):
    return table[ids]


def rms_norm(x, weight, eps):
    return norm.rms_norm(x, weight, eps, ONE, False)[0]


def project(x, weight):
    return gemm.matmul(x, pack_rows(weight, ONE), ONE)


def rotate(x, positions, cos, sin):
    return rope.rope(x, positions, cos, sin, ONE, False)


def add(stream, branch):
    return stream + branch


def swiglu(gate, up):
    return activation.swiglu(gate, up, ONE, False)


def _positions(starts):
    return np.concatenate([np.arange(n, dtype=np.int32) for n in np.diff(starts)])


def attend(q, k, v, starts):
    return _attended(q, k, v, starts)[0]


def _attended(q, k, v, starts):
    scale2 = attention_scales(q.shape[-1])[1]
    pages = attention.pages_from_sequences(k, v, starts)
    return attention.attention(q, *pages, starts, _positions(starts), scale2, ONE, False)


def log_probability(x, weight, targets, temperature):
    return _statistics(x, weight, targets, temperature)[1].logprob


def _statistics(x, weight, targets, temperature):
    z = project(x, weight)
    return z, logprob.row_statistics(z, np.float32(temperature), targets, 1, ONE)


def embed_gradient(dh, ids, grad):
    embedding.embedding_gradient(dh, ids, grad, ONE)
    return grad


def rms_norm_gradient(dy, x, weight, eps, dw):
    inv_rms = norm.rms_norm(x, weight, eps, ONE, False)[1]
    return norm.rms_norm_backward(dy, x, weight, inv_rms, dw, ONE, False), dw


def project_gradient(dy, x, weight, dw):
    weight_gradient(dy, x, dw, ONE)
    return gemm.matmul(dy, pack_columns(weight, ONE), ONE), dw


def rotate_gradient(dy, positions, cos, sin):
    return rope.rope(dy, positions, cos, sin, ONE, False, inverse=True)


def swiglu_gradient(dy, gate, up):
    return activation.swiglu_backward(dy, gate, up, ONE, False)


def attend_gradient(dout, q, k, v, starts):
    out, lse2 = _attended(q, k, v, starts)
    scale, scale2 = attention_scales(q.shape[-1])
    return attention_backward.attention_backward(dout, q, k, v, out, lse2, starts, scale, scale2, ONE, False)


def log_probability_gradient(x, weight, targets, temperature, coefficient, dw):
    z, statistics = _statistics(x, weight, targets, temperature)
    dz = logprob.logits_gradient(z, statistics, targets, coefficient, np.float32(temperature), ONE, False)
    return project_gradient(dz, x, weight, dw)


FORWARD = {
    "embedding": "embed", "rms_norm": "rms_norm", "final_norm": "rms_norm", "qk_norm": "rms_norm",
    "qkv_proj": "project", "gate_up_proj": "project", "o_proj": "project", "down_proj": "project", "rope": "rotate",
    "residual_add": "add", "swiglu": "swiglu", "attention": "attend", "logprob": "log_probability",
}  # fmt: skip
BACKWARD = {
    "embedding": "embed_gradient", "rms_norm": "rms_norm_gradient", "final_norm": "rms_norm_gradient",
    "qk_norm": "rms_norm_gradient", "o_proj": "project_gradient", "down_proj": "project_gradient",
    "rope": "rotate_gradient", "swiglu": "swiglu_gradient", "attention": "attend_gradient",
    "logprob": "log_probability_gradient",
}  # fmt: skip
