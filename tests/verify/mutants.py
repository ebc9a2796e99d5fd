"""Mutants of the CPU kernels: one line changed, each against one of the six points. Compiled in packages of their own."""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlkernel.kernels.cpu as cpu
import rlkernel.ops as ops
from rlkernel.contract.build import Contract, build_contract
from rlkernel.contract.claims import Topology
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.presets import PRESETS
from rlkernel.verify.admission.admit import admit
from rlkernel.verify.admission.certificate import AdmissionRefused
from tests.verify.mutant import (
    BACKWARD,
    BF16,
    DECODE,
    DEPENDENCY,
    FORWARD,
    ORDER,
    PRECISION,
    PRIMITIVES,
    ROUNDING,
    SPLIT,
    STEP,
    Mutant,
    made,
)

_IMPORT_GEMM = "from rlkernel.kernels.cpu.primitives import round_bf16"
_FMA_LANES = "lanes[j] = fma(a_part[j], b_part[j], lanes[j])"
_IMPORT_WGRAD = "from rlkernel.kernels.cpu.panels import pack_columns"
_BODY = "b_row = at(b, builder.mul(k, constant(PANEL_WIDTH)), builder.mul(b_panel, constant(panel)))"
_FOLLOWING = "following = builder.call(fma, [broadcast, b_vectors[v], sums[r, v]])"
_WIDE = "ir.VectorType(ir.DoubleType(), LANES)"
_THROUGH_FLOAT64 = (
    f"builder.fptrunc(builder.fadd(builder.fmul(builder.fpext(broadcast, {_WIDE}), "
    f"builder.fpext(b_vectors[v], {_WIDE})), builder.fpext(sums[r, v], {_WIDE})), vector)"
)
_ELEMENT = "element = builder.load(at(a_rows[r], a_offset))"
_LAST = "builder.sub(builder.sub(depth, constant(1)), k)"
_HEAD_FORWARD = "            z = gemm.matmul(x[first:last], host.weights.rows(region), host.workers)\n            parts.append(logprob"
_ACC = "int64(KEY_BLOCK), v_address, padded, element_address(acc, skipped * group * padded), padded,\n                )  # fmt: skip"
_LOWER = (
    "chain_lower(\n                    active, group, valid_first, int64(KEY_BLOCK), padded, element_address(block_scores, int64(0)),\n                    "
    + _ACC
)
_LINEAR_TREE = "    source, target = values, other\n    while width > 1:"

GEMM = (
    made("gemm: chain descending", ORDER, "gate_up_proj", FORWARD,
       "microkernel.py", _BODY, _BODY.replace("mul(k,", f"mul({_LAST},"),
       "microkernel.py", _ELEMENT, f"element = builder.load(at(a_rows[r], builder.mul({_LAST}, a_k)))"),
    made("gemm: product and sum rounded apart", PRIMITIVES, "down_proj", FORWARD,
       "microkernel.py", _FOLLOWING, "following = builder.fadd(builder.fmul(broadcast, b_vectors[v]), sums[r, v])"),
    made("gemm: fused multiply-add through float64", PRIMITIVES, "qkv_proj", FORWARD,
       "microkernel.py", _FOLLOWING, f"following = {_THROUGH_FLOAT64}"),
    made("wgrad: fused multiply-add through float64", PRIMITIVES, "o_proj", BACKWARD,
       "microkernel.py", _FOLLOWING, f"following = {_THROUGH_FLOAT64}"),
    made("gemm: leaves ignored", SPLIT, "down_proj", FORWARD,
       "gemm.py", "    blocks = -(-rows // MAX_ROWS)\n", "    blocks = -(-rows // MAX_ROWS)\n    leaves = 1\n", tp=2),
    made("gemm: twice the leaves", SPLIT, "o_proj", FORWARD,
       "portable.py", "y = gemm.matmul(x, host.weights.rows(region), host.workers, leaves=host.tp, bf16=host.bf16)",
       "y = gemm.matmul(x, host.weights.rows(region), host.workers, leaves=2 * host.tp, bf16=host.bf16)"),
    made("gemm: leaves merged one after the other", ORDER, "down_proj", FORWARD,
       "gemm.py", "for leaf in range(0, leaves, 2 * stride):", "for leaf in range(0, 1):",
       "gemm.py", "        stride *= 2\n", "        stride += 1\n", tp=4),
    made("gemm: leaves kept in bfloat16", PRECISION, "down_proj", FORWARD,
       "gemm.py", "buffer[left + i] = buffer[left + i] + buffer[right + i]",
       "buffer[left + i] = round_bf16(buffer[left + i]) + round_bf16(buffer[right + i])", tp=2),
    made("gemm: output truncated", ROUNDING, "gate_up_proj", FORWARD,
       "gemm.py", _IMPORT_GEMM, "from rlkernel.kernels.cpu.primitives import bits_float, float_bits, round_bf16",
       "gemm.py", "c[c_base + row * width + j] = round_bf16(c[c_base + row * width + j])",
       "c[c_base + row * width + j] = bits_float(np.uint32(float_bits(c[c_base + row * width + j]) & np.uint32(0xFFFF0000)))", dtype=BF16),
    made("gemm: output not rounded", ROUNDING, "o_proj", FORWARD,
       "gemm.py", "            if bf16:\n                for row in range(row_first", "            if bf16 and rows < 0:\n                for row in range(row_first", dtype=BF16),
    made("gemm: rounded before the bias", ROUNDING, "qkv_proj", FORWARD,
       "gemm.py", "c[c_base + row * width + j] = c[c_base + row * width + j] + bias[column + j]", "c[c_base + row * width + j] = round_bf16(c[c_base + row * width + j]) + bias[column + j]",
       dtype=BF16, preset="tiny-qwen2"),
    made("gemm: tail of the depth left out", DEPENDENCY, "gate_up_proj", FORWARD,
       "gemm.py", "k_last = min(k_first + leaf_depth, real)", "k_last = min(k_first + max(1, leaf_depth // 4 * 4), real)",
       "gemm.py", "depth, 1, 0, depth, b, b_base, outputs[part]", "depth, 1, 0, max(1, depth // 4 * 4), b, b_base, outputs[part]"),
    made("gemm: tail of the depth left out of pairs of panels", DEPENDENCY, "gate_up_proj", FORWARD,
       "gemm.py", "c_base, width, depth, False", "c_base, width, max(1, depth // 4 * 4), False"),
    made("gemm: operands rounded to bfloat16", PRECISION, "qkv_proj", FORWARD,
       "gemm.py", "        a.reshape(-1), rows, panels.depth, panels.depth if real", "        widen(narrow(a)).reshape(-1), rows, panels.depth, panels.depth if real",
       "gemm.py", "panels.data.reshape(-1), panels.rows, leaves", "widen(narrow(panels.data)).reshape(-1), panels.rows, leaves",
       "gemm.py", _IMPORT_GEMM, _IMPORT_GEMM + "\nfrom rlkernel.kernels.cpu.convert import narrow, widen"),
    made("wgrad: tokens descending", ORDER, "gate_up_proj", BACKWARD,
       "gemm_gradient.py", "packed_dy = pack_columns(dy[start : start + tokens], workers).data", "packed_dy = pack_columns(dy[start : start + tokens][::-1], workers).data",
       "gemm_gradient.py", "packed_x = pack_columns(x[start : start + tokens], workers).data", "packed_x = pack_columns(x[start : start + tokens][::-1], workers).data"),
    made("wgrad: each call from +0", SPLIT, "down_proj", BACKWARD,
       "gemm_gradient.py", "    step = max(DEPTH_BLOCK, _SCRATCH // max(rows, columns))\n", "    step = max(DEPTH_BLOCK, _SCRATCH // max(rows, columns))\n    outer, grad = grad, np.zeros_like(grad)\n",
       "gemm_gradient.py", "            grain=grain_of(min(rows, PANEL_WIDTH), tokens * panels_of_part),\n        )  # fmt: skip\n", "            grain=grain_of(min(rows, PANEL_WIDTH), tokens * panels_of_part),\n        )  # fmt: skip\n    outer += grad\n"),
    made("wgrad: kept in bfloat16", PRECISION, "o_proj", BACKWARD,
       "gemm_gradient.py", "            grain=grain_of(min(rows, PANEL_WIDTH), tokens * panels_of_part),\n        )  # fmt: skip\n", "            grain=grain_of(min(rows, PANEL_WIDTH), tokens * panels_of_part),\n        )  # fmt: skip\n    grad[:] = widen(narrow(grad))\n",
       "gemm_gradient.py", _IMPORT_WGRAD, _IMPORT_WGRAD + "\nfrom rlkernel.kernels.cpu.convert import narrow, widen", dtype=BF16),
    made("bias gradient: tokens descending", ORDER, "qkv_proj", BACKWARD,
       "gemm_gradient.py", "    for t in range(dy.shape[0]):\n        for n in range(first, last):", "    for t in range(dy.shape[0] - 1, -1, -1):\n        for n in range(first, last):", preset="tiny-qwen2"),
    made("bias gradient: the last token left out", DEPENDENCY, "qkv_proj", BACKWARD,
       "gemm_gradient.py", "    for t in range(dy.shape[0]):\n        for n in range(first, last):", "    for t in range(dy.shape[0] - 1):\n        for n in range(first, last):", preset="tiny-qwen2"),
    made("dgrad: not rounded", ROUNDING, "down_proj", BACKWARD,
       "portable.py", "dx = gemm.matmul(dy, host.weights.columns(region), host.workers, bf16=host.bf16)", "dx = gemm.matmul(dy, host.weights.columns(region), host.workers)", dtype=BF16),
    made("dgrad: leaves ignored", SPLIT, "gate_up_proj", BACKWARD,
       "portable.py", "host.weights.columns(region), host.workers, leaves=host.tp, bf16=host.bf16),)", "host.weights.columns(region), host.workers, bf16=host.bf16),)", tp=2),
)  # fmt: skip

NORM = (
    made("norm: tree pairs halves", ORDER, "rms_norm", FORWARD,
       "reductions.py", "target[j] = source[2 * j] + source[2 * j + 1]", "target[j] = source[j] + source[j + width]"),
    made("norm: lanes merged one after the other", ORDER, "final_norm", FORWARD,
       "reductions.py", _LINEAR_TREE, "    total = values[0]\n    for j in range(1, width):\n        total = total + values[j]\n    return total\n" + _LINEAR_TREE),
    made("norm: 64 lanes", SPLIT, "rms_norm", FORWARD, "reductions.py", "LANES = 256", "LANES = 64"),
    made("norm: product and sum rounded apart", PRIMITIVES, "rms_norm", FORWARD,
       "reductions.py", _FMA_LANES, "lanes[j] = a_part[j] * b_part[j] + lanes[j]"),
    made("norm: fused multiply-add through float64", PRIMITIVES, "rms_norm", FORWARD,
       "reductions.py", _FMA_LANES, "lanes[j] = f32(np.float64(a_part[j]) * np.float64(b_part[j]) + np.float64(lanes[j]))"),
    made("norm: product with 1/H", PRIMITIVES, "rms_norm", FORWARD,
       "norm.py", "mean = lane_dot(row, row, lanes, other) / f32(columns)", "mean = lane_dot(row, row, lanes, other) * (f32(1.0) / f32(columns))"),
    made("norm: epsilon after the root", PRIMITIVES, "rms_norm", FORWARD,
       "norm.py", "np.sqrt(mean + eps)", "(np.sqrt(mean) + eps)"),
    made("norm: root of the reciprocal", PRIMITIVES, "qk_norm", FORWARD,
       "norm.py", "f32(1.0) / np.sqrt(mean + eps)", "np.sqrt(f32(1.0) / (mean + eps))"),
    made("norm: reciprocal root rounded once", PRIMITIVES, "rms_norm", FORWARD,
       "norm.py", "f32(1.0) / np.sqrt(mean + eps)", "f32(1.0 / np.sqrt(np.float64(mean + eps)))"),
    made("norm: sum in float64", PRECISION, "rms_norm", FORWARD,
       "norm.py", "        mean = lane_dot(row, row, lanes, other) / f32(columns)", "        total = np.float64(0.0)\n        for j in range(columns):\n            total += np.float64(row[j]) * np.float64(row[j])\n        mean = f32(total) / f32(columns)"),
    made("norm: rounded before the weight", ROUNDING, "rms_norm", FORWARD,
       "norm.py", "out[j] = cast(row[j] * r * w[j], bf16)", "out[j] = cast(cast(row[j] * r, bf16) * w[j], bf16)", dtype=BF16),
    made("norm: output not rounded", ROUNDING, "qk_norm", FORWARD,
       "norm.py", "out[j] = cast(row[j] * r * w[j], bf16)", "out[j] = row[j] * r * w[j]", dtype=BF16),
    made("norm: last element left out of the mean", DEPENDENCY, "rms_norm", FORWARD,
       "norm.py", "mean = lane_dot(row, row, lanes, other) / f32(columns)", "mean = lane_dot(row[: max(1, columns - 1)], row[: max(1, columns - 1)], lanes, other) / f32(columns)"),
    made("norm: scale of the row before", DEPENDENCY, "rms_norm", FORWARD,
       "norm.py", "        inv_rms[i] = r\n", "        inv_rms[i] = r\n        r = inv_rms[max(0, i - 1)]\n"),
    made("norm gradient: tokens descending", ORDER, "rms_norm", BACKWARD,
       "norm.py", "    for i in range(x.shape[0]):", "    for i in range(x.shape[0] - 1, -1, -1):"),
    made("norm gradient: product and difference rounded apart", PRIMITIVES, "rms_norm", BACKWARD,
       "norm.py", "out[j] = cast(r * fma(-xh[j], c, g[j]), bf16)", "out[j] = cast(r * (g[j] - xh[j] * c), bf16)"),
    made("norm gradient: normed values rounded", ROUNDING, "final_norm", BACKWARD,
       "norm.py", "xh[j] = row[j] * r", "xh[j] = cast(row[j] * r, bf16)", dtype=BF16),
    made("norm gradient: weight's chain in bfloat16", PRECISION, "rms_norm", BACKWARD,
       "norm.py", "part[j] = fma(row_dy[j], row[j] * r, part[j])", "part[j] = cast(fma(row_dy[j], row[j] * r, part[j]), True)"),
    made("residual: not rounded", ROUNDING, "residual_add", FORWARD,
       "norm.py", "out_part[j] = cast(a_part[j] + b_part[j], bf16)", "out_part[j] = a_part[j] + b_part[j]", dtype=BF16),
)  # fmt: skip

ELEMENTWISE = (
    made("rope: products rounded apart", PRIMITIVES, "rope", FORWARD,
       "rope.py", "o1[j] = cast(fma(x1[j], c[j], -(x2[j] * t)), bf16)", "o1[j] = cast(x1[j] * c[j] - x2[j] * t, bf16)",
       "rope.py", "o2[j] = cast(fma(x2[j], c[j], x1[j] * t), bf16)", "o2[j] = cast(x2[j] * c[j] + x1[j] * t, bf16)"),
    made("rope: the other product fused", PRIMITIVES, "rope", BACKWARD,
       "rope.py", "o1[j] = cast(fma(x1[j], c[j], -(x2[j] * t)), bf16)", "o1[j] = cast(fma(-x2[j], t, x1[j] * c[j]), bf16)",
       "rope.py", "o2[j] = cast(fma(x2[j], c[j], x1[j] * t), bf16)", "o2[j] = cast(fma(x1[j], t, x2[j] * c[j]), bf16)"),
    made("rope: tables rounded", ROUNDING, "rope", FORWARD,
       "rope.py", "t = s[j] * sign", "t = cast(s[j] * sign, bf16)",
       "rope.py", "o1[j] = cast(fma(x1[j], c[j],", "o1[j] = cast(fma(x1[j], cast(c[j], bf16),",
       "rope.py", "o2[j] = cast(fma(x2[j], c[j],", "o2[j] = cast(fma(x2[j], cast(c[j], bf16),", dtype=BF16),
    made("rope: in float64", PRECISION, "rope", FORWARD,
       "rope.py", "o1[j] = cast(fma(x1[j], c[j], -(x2[j] * t)), bf16)", "o1[j] = cast(f32(np.float64(x1[j]) * c[j] - np.float64(x2[j]) * t), bf16)",
       "rope.py", "o2[j] = cast(fma(x2[j], c[j], x1[j] * t), bf16)", "o2[j] = cast(f32(np.float64(x2[j]) * c[j] + np.float64(x1[j]) * t), bf16)"),
    made("rope: positions from the batch", DEPENDENCY, "rope", FORWARD,
       "rope.py", "c = cos[positions[i]]", "c = cos[i]", "rope.py", "s = sin[positions[i]]", "s = sin[i]"),
    made("swiglu: associated otherwise", PRIMITIVES, "swiglu", FORWARD,
       "activation.py", "cast(g * sigmoid(g) * up_part[j], bf16)", "cast(g * (sigmoid(g) * up_part[j]), bf16)"),
    made("swiglu: SiLU rounded", ROUNDING, "swiglu", FORWARD,
       "activation.py", "cast(g * sigmoid(g) * up_part[j], bf16)", "cast(cast(g * sigmoid(g), bf16) * up_part[j], bf16)", dtype=BF16),
    made("swiglu: exp2.p3", PRIMITIVES, "swiglu", FORWARD,
       "primitives.py", "return f32(1.0) / (f32(1.0) + exp2_full(-x * LOG2E))", "return f32(1.0) / (f32(1.0) + exp2_p3(-x * LOG2E))"),
    made("swiglu: a float64 product", PRECISION, "swiglu", FORWARD,
       "primitives.py", "return f32(1.0) / (f32(1.0) + exp2_full(-x * LOG2E))", "return f32(1.0) / (f32(1.0) + exp2_full(f32(-x * 1.4426950408889634)))"),
    made("swiglu gradient: product and sum rounded apart", PRIMITIVES, "swiglu", BACKWARD,
       "activation.py", "fma(g, f32(1.0) - sg, f32(1.0))", "(g * (f32(1.0) - sg) + f32(1.0))"),
    made("swiglu gradient: SiLU rounded", ROUNDING, "swiglu", BACKWARD,
       "activation.py", "cast(ds * (g * sg), bf16)", "cast(ds * cast(g * sg, bf16), bf16)", dtype=BF16),
    made("embedding: the next row", DEPENDENCY, "embedding", FORWARD,
       "portable.py", "host.weights.embed(inputs[0])", "host.weights.embed(np.maximum(inputs[0] - 1, 0))"),
    made("embedding gradient: tokens descending", ORDER, "embedding", BACKWARD,
       "embedding.py", "for i in range(ids.size):", "for i in range(ids.size - 1, -1, -1):"),
    made("embedding gradient: in bfloat16", PRECISION, "embedding", BACKWARD,
       "embedding.py", "target[j] = target[j] + source[j]", "target[j] = round_bf16(target[j] + source[j])",
       "embedding.py", "from rlkernel.kernels.cpu.jit import kernel", "from rlkernel.kernels.cpu.jit import kernel\nfrom rlkernel.kernels.cpu.primitives import round_bf16"),
    made("embedding gradient: the last token only", DEPENDENCY, "embedding", BACKWARD,
       "embedding.py", "target[j] = target[j] + source[j]", "target[j] = source[j]"),
    made("embedding gradient: each call from +0", SPLIT, "embedding", BACKWARD,
       "embedding.py", "workers.run(_embedding_gradient, columns, dh, ids, grad, grain=grain)", "part = np.zeros_like(grad)\n    workers.run(_embedding_gradient, columns, dh, ids, part, grain=grain)\n    grad += part"),
)  # fmt: skip

HEAD = (
    made("logprob: leaves of 64", SPLIT, "logprob", FORWARD, "logprob.py", "LEAF = 128", "LEAF = 64"),
    made("logprob: tree pairs halves", ORDER, "logprob", FORWARD,
       "reductions.py", "target[j] = source[2 * j] + source[2 * j + 1]", "target[j] = source[j] + source[j + width]"),
    made("logprob: leaves descending", ORDER, "logprob", FORWARD,
       "logprob.py", "            for n in range(count):\n", "            for n in range(count - 1, -1, -1):\n"),
    made("logprob: reciprocal of the temperature", PRIMITIVES, "logprob", FORWARD,
       "logprob.py", "z = leaf[j] / temperature", "z = leaf[j] * (f32(1.0) / temperature)"),
    made("logprob: rescaled sums rounded apart", PRIMITIVES, "logprob", FORWARD,
       "logprob.py", "total = fma(leaf_s[n], weight, total)", "total = leaf_s[n] * weight + total"),
    made("logprob: padding counts", DEPENDENCY, "logprob", FORWARD,
       "head.py", _HEAD_FORWARD, _HEAD_FORWARD.replace("            parts", "            z = np.pad(z, ((0, 0), (0, -z.shape[1] % (128 * host.tp))))\n            parts")),
    made("logprob: logits rounded", ROUNDING, "logprob", FORWARD,
       "head.py", _HEAD_FORWARD, _HEAD_FORWARD.replace("host.workers)", "host.workers, bf16=True)")),
    made("logprob: maximum and log-sum added first", ORDER, "logprob", FORWARD,
       "logprob.py", "(z[i, targets[i]] - top) - log_sum", "z[i, targets[i]] - (top + log_sum)"),
    made("logprob: library logarithm", PRIMITIVES, "logprob", FORWARD,
       "logprob.py", "log_sum = log2_full(total) * LN2", "log_sum = f32(np.log(np.float64(total)))"),
    made("logprob: leaf sums in float64", PRECISION, "logprob", FORWARD,
       "logprob.py", "    return tree(weights, other, LEAF), tree(moments, other, LEAF)", "    a = np.float64(0.0)\n    b = np.float64(0.0)\n    for j in range(LEAF):\n        a += np.float64(weights[j])\n        b += np.float64(moments[j])\n    return f32(a), f32(b)"),
    made("logits gradient: not rounded", ROUNDING, "logprob", BACKWARD,
       "logprob.py", "out[j] = cast((f32(0.0) - p) * c, bf16)", "out[j] = (f32(0.0) - p) * c",
       "logprob.py", "out[at] = cast((f32(1.0) - p) * c, bf16)", "out[at] = (f32(1.0) - p) * c", dtype=BF16),
    made("logits gradient: reciprocal of the temperature", PRIMITIVES, "logprob", BACKWARD,
       "logprob.py", "c = coefficient[i] / temperature", "c = coefficient[i] * (f32(1.0) / temperature)"),
    made("logits gradient: maximum and log-sum added first", ORDER, "logprob", BACKWARD,
       "logprob.py", "exp2_full(((row[j] - top) - log_total) * LOG2E)", "exp2_full((row[j] - (top + log_total)) * LOG2E)",
       "logprob.py", "exp2_full(((target - top) - log_total) * LOG2E)", "exp2_full((target - (top + log_total)) * LOG2E)"),
)  # fmt: skip

ATTENTION = (
    made("attention: splits of 256", SPLIT, "attention", FORWARD, "attention.py", "SPLIT = 512", "SPLIT = 256"),
    made("attention: key blocks of 32", SPLIT, "attention", FORWARD, "attention_tile.py", "KEY_BLOCK = 64", "KEY_BLOCK = 32"),
    made("attention: row sum descending", ORDER, "attention", FORWARD,
       "attention.py", "sums[r + 3]\n        for j in range(KEY_BLOCK):", "sums[r + 3]\n        for j in range(KEY_BLOCK - 1, -1, -1):",
       "attention.py", "total = sums[r]\n        for j in range(KEY_BLOCK):", "total = sums[r]\n        for j in range(KEY_BLOCK - 1, -1, -1):"),
    made("attention: splits descending", ORDER, "attention", FORWARD,
       "attention.py", "            for split in range(seen):", "            for split in range(seen - 1, -1, -1):"),
    made("attention: another exponential", PRIMITIVES, "attention", FORWARD,
       "attention.py", "row[j] = round_bf16(exp2_p3(row[j] - new))", "row[j] = round_bf16(exp2_full(row[j] - new))", dtype=BF16),
    made("attention: weights not rounded", ROUNDING, "attention", FORWARD,
       "attention.py", "row[j] = round_bf16(exp2_p3(row[j] - new))", "row[j] = exp2_p3(row[j] - new)", dtype=BF16),
    made("attention: reciprocal of the row sum", PRIMITIVES, "attention", FORWARD,
       "attention.py", "cast(result[d] / total, bf16)", "cast(result[d] * (f32(1.0) / total), bf16)"),
    made("attention: one key too many", DEPENDENCY, "attention", FORWARD,
       "attention.py", "valid_first = position + skipped - start + 1", "valid_first = position + skipped - start + 2"),
    made("attention: masked values are multiplied", DEPENDENCY, "attention", DECODE,
       "attention.py", _LOWER, "chain_block(\n                    active, padded, element_address(block_scores, int64(0)), int64(KEY_BLOCK), int64(1), v_address, padded,\n                    element_address(acc, skipped * group * padded), padded, int64(KEY_BLOCK), int64(0),\n                )  # fmt: skip"),
    made("attention: accumulator rests in bfloat16", PRECISION, "attention", FORWARD,
       "attention.py", _ACC, _ACC + "\n                for x in range(skipped * group * padded, (skipped * group + active) * padded):\n                    acc[x] = round_bf16(acc[x])"),
    made("attention gradient: delta rounded apart", PRIMITIVES, "attention", BACKWARD,
       "attention_backward.py", "a0 = fma(dout[r, d], out[r, d], a0)", "a0 = dout[r, d] * out[r, d] + a0",
       "attention_backward.py", "a1 = fma(dout[r + 1, d], out[r + 1, d], a1)", "a1 = dout[r + 1, d] * out[r + 1, d] + a1",
       "attention_backward.py", "a2 = fma(dout[r + 2, d], out[r + 2, d], a2)", "a2 = dout[r + 2, d] * out[r + 2, d] + a2",
       "attention_backward.py", "a3 = fma(dout[r + 3, d], out[r + 3, d], a3)", "a3 = dout[r + 3, d] * out[r + 3, d] + a3",
       "attention_backward.py", "total = fma(dout[r, d], out[r, d], total)", "total = dout[r, d] * out[r, d] + total"),
    made("attention gradient: score gradients not rounded", ROUNDING, "attention", BACKWARD,
       "attention_backward.py", "gradients[j] = round_bf16(p * (gradients[j] - delta))", "gradients[j] = p * (gradients[j] - delta)", dtype=BF16),
    made("attention gradient: product spread", PRIMITIVES, "attention", BACKWARD,
       "attention_backward.py", "            gradients[j] = p * (gradients[j] - delta)\n            scores[j] = p\n", "            gradients[j] = p * gradients[j] - p * delta\n            scores[j] = p\n"),
    made("attention gradient: heads descending", ORDER, "attention", BACKWARD,
       "attention_backward.py", "for head in range(kv_head * group, (kv_head + 1) * group):", "for head in range((kv_head + 1) * group - 1, kv_head * group - 1, -1):"),
    made("attention gradient: keys after the query", DEPENDENCY, "attention", BACKWARD,
       "attention_backward.py", "rows, one, one if diagonal else block, block, padded, g, block,", "rows, one, min(columns, one + one) if diagonal else block, block, padded, g, block,"),
    made("attention gradient: rounded before the scale", ROUNDING, "attention", BACKWARD,
       "attention_backward.py", "cast(scale * dq_sum[r * padded + d], bf16)", "cast(scale * cast(dq_sum[r * padded + d], bf16), bf16)",
       dtype=BF16, head_dim=32),  # of 16 the scale is 1/4, and rounding before or after it is the same function
    made("attention gradient: another exponential", PRIMITIVES, "attention", BACKWARD,
       "attention_backward.py", "p = exp2_p3(scores[j] * scale2 - lse2)", "p = exp2_full(scores[j] * scale2 - lse2)", dtype=BF16),
    made("attention gradient: contracted", PRIMITIVES, "attention", BACKWARD,
       "attention_backward.py", "p = exp2_full(scores[j] * scale2 - lse2)", "p = exp2_full(fma(scores[j], scale2, -lse2))"),
)  # fmt: skip

OPTIMIZER = (
    made("norm of gradients: leaves of 512", SPLIT, "gradient_norm", STEP, "optimizer.py", "SQUARES_LEAF = 1024", "SQUARES_LEAF = 512"),
    made("norm of gradients: names descending", ORDER, "gradient_norm", STEP,
       "optimizer.py", "for name in sorted(gradients):", "for name in sorted(gradients, reverse=True):"),
    made("norm of gradients: leaves one after the other", ORDER, "gradient_norm", STEP,
       "reductions.py", "    while level.size > 1:\n        level = level[0::2] + level[1::2]\n    return np.float32(level[0])", "    total = level[0]\n    for value in level[1:]:\n        total = np.float32(total + value)\n    return np.float32(total)"),
    made("norm of gradients: sum in float64", PRECISION, "gradient_norm", STEP,
       "optimizer.py", "total = np.float32(total + sum_of_squares(gradients[name], workers))", "total = np.float64(total) + np.float64(sum_of_squares(gradients[name], workers))"),
    made("clipping: epsilon in the quotient", PRIMITIVES, "gradient_norm", STEP,
       "optimizer.py", "np.float32(bound / norm)", "np.float32(bound / np.float32(norm + np.float32(1e-6)))"),
    made("adamw: epsilon under the root", PRIMITIVES, "adamw", STEP,
       "optimizer.py", "(np.sqrt(v_new * correct2) + eps)", "np.sqrt(v_new * correct2 + eps)"),
    made("adamw: contracted", PRIMITIVES, "adamw", STEP,
       "optimizer.py", "new = old - lr * fma(decay, old, step)", "new = fma(-lr, fma(decay, old, step), old)"),
    made("adamw: square associated otherwise", PRIMITIVES, "adamw", STEP, "optimizer.py", "keep2 * (g * g)", "keep2 * g * g"),
    made("adamw: weight not rounded", ROUNDING, "adamw", STEP, "optimizer.py", "weight_part[j] = cast(new, bf16)", "weight_part[j] = new", dtype=BF16),
    made("adamw: master rounded", ROUNDING, "adamw", STEP, "optimizer.py", "master_part[j] = new", "master_part[j] = cast(new, bf16)", dtype=BF16),
    made("adamw: step in float64", PRECISION, "adamw", STEP,
       "optimizer.py", "step = (m_new * correct1) / (np.sqrt(v_new * correct2) + eps)", "step = np.float32((np.float64(m_new) * correct1) / (np.float64(np.sqrt(v_new * correct2)) + eps))"),
    made("adamw: not clipped", DEPENDENCY, "adamw", STEP, "optimizer.py", "g = grad_part[j] * clip", "g = grad_part[j]"),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = GEMM + NORM + ELEMENTWISE + HEAD + ATTENTION + OPTIMIZER


def contract_of(mutant: Mutant) -> Contract:
    """The contract that a mutant is held to: a tiny model with all of the 256 lanes."""
    config = replace(
        PRESETS[mutant.preset], hidden_size=320, num_heads=8, num_kv_heads=4, head_dim=mutant.head_dim,
        intermediate_size=64 * mutant.tp,
    )  # fmt: skip
    return build_contract(config, dtype=mutant.dtype, topology=Topology(tp=mutant.tp))


def load(mutant: Mutant, folder: Path, package: str) -> Any:
    """The mutant as an operation: its sources are written to ``folder``/``package`` and imported from there.

    Raises ValueError where an edit does not fit the sources any more.
    """
    target = folder / package
    sources = {path.name: path.read_text() for path in Path(cpu.__file__).parent.glob("*.py")}
    sources |= {name: (Path(ops.__file__).parent / name).read_text() for name in ("portable.py", "head.py")}
    for file, old, new in mutant.edits:
        if sources[file].count(old) != 1:
            raise ValueError(f"{mutant.name}: {old!r} stands {sources[file].count(old)} times in {file}, not once")
        sources[file] = sources[file].replace(old, new)
    target.mkdir(parents=True)
    for name, text in sources.items():
        text = text.replace("rlkernel.kernels.cpu", package).replace("cache=True", "cache=False")
        # symbols that the linker may merge with those of other modules: each package has its own
        text = text.replace("rlkernel_fma_tile_", f"{package}_fma_tile_")
        (target / name).write_text(text)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        if mutant.region in ("gradient_norm", "adamw"):
            return _step(importlib.import_module(f"{package}.optimizer"), mutant.region)
        if mutant.region == "logprob":
            return importlib.import_module(f"{package}.head").LinearLogprob()
        return importlib.import_module(f"{package}.portable").portable_ops()[mutant.region]
    finally:
        sys.path.remove(str(folder))


def refuse(mutant: Mutant, folder: Path, package: str, workers: Workers) -> dict[str, Any] | None:
    """What admission says of a mutant; None if it is admitted."""
    operation = load(mutant, folder, package)
    try:
        admit(operation, mutant.region, mutant.case, contract_of(mutant), workers=workers)
    except AdmissionRefused as refused:
        return refused.report
    finally:
        unload(folder, package)
    return None


def unload(folder: Path, package: str) -> None:
    """Forget the mutant's modules and remove its sources."""
    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
        del sys.modules[name]
    shutil.rmtree(folder / package, ignore_errors=True)


def _step(kernels: Any, region: str) -> Any:
    from rlkernel.verify.admission import step

    base = step.CpuGradientNorm if region == "gradient_norm" else step.CpuAdamW
    return base(kernels)
