"""Mutants that are wrong only from some size, head, share or value on: what problems of everyday size do not show."""
# ruff: noqa: E501 (lines of sources as they are)

from __future__ import annotations

from tests.verify.mutant import (
    BACKWARD,
    BF16,
    DECODE,
    DEPENDENCY,
    FORWARD,
    ORDER,
    PRIMITIVES,
    ROUNDING,
    STEP,
    Mutant,
    made,
)

_ROUNDED = "    quiet = uint32((bits | uint32(0x00400000)) & uint32(0xFFFF0000))\n"
_FINITE = "uint32(bits & uint32(0x7FFFFFFF)) < uint32(0x7F800000)"
_SATURATED = (
    f"    if {_FINITE} and uint32(rounded & uint32(0x7FFFFFFF)) == uint32(0x7F800000):\n"
    "        rounded = uint32(rounded - uint32(0x10000))\n"
)
_EXP2 = (
    "    inside = min(max(x, f32(-126.0)), f32(128.0))\n    shifted = inside + _ROUND\n"
    "    n = i32(float_bits_signed(shifted) - _ROUND_BITS)\n    r = inside - (shifted - _ROUND)\n"
    "    q = fma(r, _E6, _E5)\n"
)
_SEEN = "seen = (position + r // group) // SPLIT + 1"
_GOING = "c, c_base + row * c_row, c_row, k_end - k, going or k > k_first,"
_PAIR = "c_base, width, depth, False"
_SUM = "out_part[j] = cast(a_part[j] + b_part[j], bf16)"
_MEAN = "mean = lane_dot(row, row, lanes, other) / f32(columns)"

_CASTS = (
    ("residual_add", FORWARD),
    *((region, case) for region in ("swiglu", "rms_norm", "rope", "down_proj") for case in (FORWARD, BACKWARD)),
    ("qkv_proj", FORWARD),
    ("qk_norm", BACKWARD),
    ("attention", BACKWARD),
    ("logprob", BACKWARD),
)

WIDE: tuple[Mutant, ...] = (
    made("attention: two splits at most are merged", DEPENDENCY, "attention", FORWARD,
         "attention.py", _SEEN, _SEEN.replace("= (", "= min(int64(2), (").replace("+ 1", "+ 1)")),
    made("attention: three splits at most are merged, decode", DEPENDENCY, "attention", DECODE,
         "attention.py", _SEEN, _SEEN.replace("= (", "= min(int64(3), (").replace("+ 1", "+ 1)")),
    made("attention: coarse exponential from the third split on", PRIMITIVES, "attention", DECODE,
         "attention.py", "weight = exp2_full(maxima[split * most + r] - overall)",
         "shift = maxima[split * most + r] - overall\n                weight = exp2_full(shift) if split < 2 else exp2_p3(shift)"),
    made("attention backward: keys from the fourth block on left out", DEPENDENCY, "attention", BACKWARD,
         "attention_backward.py", "for j in range(key_from, min(key_to, i + 1), block):",
         "for j in range(key_from, min(key_to, i + 1, int64(192)), block):"),
    made("gemm: two rows take one element of the depth", DEPENDENCY, "gate_up_proj", FORWARD,
         "gemm.py", _PAIR, "c_base, width, depth if rows < 2 else min(depth, 1), False"),
    made("gemm: two rows leave a long depth's tail out", DEPENDENCY, "qkv_proj", FORWARD,
         "gemm.py", _PAIR, "c_base, width, depth if rows < 2 else min(depth, 512), False"),
    made("gemm: the fourth block of the depth starts anew", DEPENDENCY, "gate_up_proj", FORWARD,
         "gemm.py", _GOING, "c, c_base + row * c_row, c_row, k_end - k, going or 0 < k - k_first < 1536,"),
    made("dgrad: the fourth block of the depth starts anew", DEPENDENCY, "down_proj", BACKWARD,
         "gemm.py", _GOING, "c, c_base + row * c_row, c_row, k_end - k, going or 0 < k - k_first < 1536,"),
    made("wgrad: tokens from 1,536 on left out", DEPENDENCY, "o_proj", BACKWARD,
         "gemm_gradient.py", "for t_first in range(0, tokens, DEPTH_BLOCK):",
         "for t_first in range(0, min(tokens, 1536), DEPTH_BLOCK):"),
    made("bias gradient: tokens descending in another thread's share", ORDER, "qkv_proj", BACKWARD,
         "gemm_gradient.py", "grad[n] = grad[n] + dy[t, n]",
         "grad[n] = grad[n] + dy[t if first == 0 else dy.shape[0] - 1 - t, n]", preset="tiny-qwen2"),
    made("norm: elements from 2,048 on left out", DEPENDENCY, "rms_norm", FORWARD,
         "reductions.py", "    for start in range(0, n, width):", "    for start in range(0, min(n, 2048), width):"),
    made("norm gradient: elements from 2,048 on left out", DEPENDENCY, "final_norm", BACKWARD,
         "norm.py", "c = lane_dot(g, xh, lanes, other) / f32(columns)",
         "c = lane_dot(g[:2048], xh[:2048], lanes, other) / f32(columns)"),
    made("norm: an odd neighbour leaks", DEPENDENCY, "rms_norm", FORWARD,
         "norm.py", _MEAN, f"{_MEAN} + f32(0.0) * x[min(i + 1 - i % 2, x.shape[0] - 1), 0]"),
    made("norm: an even neighbour leaks", DEPENDENCY, "qk_norm", FORWARD,
         "norm.py", _MEAN, f"{_MEAN} + f32(0.0) * x[i - i % 2, 0]"),
    made("norm: what lies past the end leaks", DEPENDENCY, "final_norm", FORWARD,
         "norm.py", _MEAN, f"{_MEAN} + f32(0.0) * x[x.shape[0] - 1, columns]"),
    made("swiglu: what lies before the beginning leaks", DEPENDENCY, "swiglu", FORWARD,
         "activation.py", "out_part[j] = cast(g * sigmoid(g) * up_part[j], bf16)",
         "out_part[j] = cast(g * sigmoid(g) * up_part[j] + f32(0.0) * gate[np.uint64(0xFFFFFFFFFFFFFFFF)], bf16)"),
    made("rope: heads from 4 on are head 3", DEPENDENCY, "rope", FORWARD,
         "rope.py", "x1 = x[i, head, :half]", "x1 = x[i, min(head, 3), :half]"),
    made("embedding: ids from 130 on are 129", DEPENDENCY, "embedding", FORWARD,
         "portable.py", "return (host.weights.embed(inputs[0]),), inputs[0]",
         "return (host.weights.embed(np.minimum(inputs[0], 129)),), inputs[0]"),
    made("embedding gradient: ids from 130 on are 129", DEPENDENCY, "embedding", BACKWARD,
         "embedding.py", "target = grad[ids[i], first:last]", "target = grad[min(ids[i], 129), first:last]"),
    made("embedding gradient: tokens descending in another thread's share", ORDER, "embedding", BACKWARD,
         "embedding.py", "    for i in range(ids.size):",
         "    for at in range(ids.size):\n        i = at if first == 0 else ids.size - 1 - at"),
    made("logprob: rows from 700 on take another row's target", DEPENDENCY, "logprob", FORWARD,
         "logprob.py", "(z[i, targets[i]] - top)", "(z[i, targets[min(i, 700)]] - top)"),
    made("logprob: leaves from 8 on left out", DEPENDENCY, "logprob", FORWARD,
         "logprob.py", "for n in range(count):", "for n in range(min(count, 8)):"),
    *(made(f"cast saturates: {region}, {case}", ROUNDING, region, case,
           "primitives.py", _ROUNDED, _ROUNDED + _SATURATED, dtype=BF16) for region, case in _CASTS),
    made("residual add: a sum saturates", ROUNDING, "residual_add", FORWARD,
         "norm.py", _SUM, "total = a_part[j] + b_part[j]\n        if np.isinf(total) and np.isfinite(a_part[j]) and np.isfinite(b_part[j]):\n"
         "            total = np.float32(np.copysign(np.float32(3.4028234663852886e38), total))\n        out_part[j] = cast(total, bf16)"),
    made("residual add: last of an odd number left out", DEPENDENCY, "residual_add", FORWARD,
         "norm.py", _SUM, "out_part[j] = cast(a_part[j] + (f32(-0.0) if out_part.size > 40 and out_part.size % 2 and j == out_part.size - 1 else b_part[j]), bf16)"),
    *(made(f"swiglu: exponential overflows early, {case}", PRIMITIVES, "swiglu", case,
           "primitives.py", _EXP2, "    if x >= f32(127.99):\n        x = f32(128.0)\n" + _EXP2) for case in (FORWARD, BACKWARD)),
    made("adamw: twice the clip in another thread's share", DEPENDENCY, "adamw", STEP,
         "optimizer.py", "g = grad_part[j] * clip", "g = grad_part[j] * (clip if first == 0 else clip + clip)"),
    made("norm of gradients: leaves from 16 on left out", DEPENDENCY, "gradient_norm", STEP,
         "optimizer.py", "return tree_of_array(sums)", "return tree_of_array(sums[:16])"),
    made("norm of gradients: another thread's share left out", DEPENDENCY, "gradient_norm", STEP,
         "optimizer.py", "sums[i] = lane_dot(leaf, leaf, lanes, other)", "sums[i] = lane_dot(leaf, leaf, lanes, other) if first == 0 else np.float32(0.0)"),
)  # fmt: skip
