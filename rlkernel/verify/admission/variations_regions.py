"""Deviations of single formulas, region by region: a line of the interpreter written otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlkernel.reference.arith import cast_bf16
from rlkernel.reference.reductions import multiply_accumulate
from rlkernel.reference.regions import continued
from rlkernel.verify.admission.chains import (
    cut,
    descending,
    from_zero,
    in_bf16,
    in_float64,
    narrow_inputs,
    rounded_state,
    tf32_inputs,
    unfused,
)
from rlkernel.verify.admission.variants import Chain, Edit, Function, Line, Variation
from rlkernel.verify.admission.variations import (
    TF32,
    lane_count,
    not_rounded,
)

_NORM = "return output(points, mul(mul(x, inverse[:, None]), weight[None, :])), inverse"
_INVERSE = "inverse = div(torch.ones_like(mean), sqrt(add(mean, eps)))"
_MEAN = "mean = div(row_sum(points, x, x), width)"
_DX = "dx = mul(inverse[:, None].expand_as(x), fma32(-xh, c[:, None].expand_as(x), g))"
_XH = "xh = mul(x, inverse[:, None])"
_RUNNING = "running = fused(dy[t], xh[t], running)"
_SILU = "return (array(output(points, mul(mul(gate, sg), up))),), (gate, up)"
_DGATE = "d_gate = mul(mul(ds, up), mul(sg, fma32(gate, sub(one, sg), one)))"
_SIGMOID = 'return div(one, add(one, primitive(points.primitive("exp2"))(mul(-x, log2e))))'
_ROTATED = "rotated = torch.cat([fma32(first, c, -mul(second, s)), fma32(second, c, mul(first, s))], dim=-1)"
_PROJECTED = "y = array(output(points, matmul(points, x, self.interpreter.weight(host, name), bias=bias)))"
_TOKENS = "for token, row in zip(saved.tolist(), rows, strict=True):"
_LOGITS = "return div(z, scalar(temperature, z))"
_LOGPROB = "logprob = sub(sub(chosen, largest), log_sum)"
_P = "p = exp2(mul(sub(sub(z, m), log_sum), scalar(LOG2E, z)))"
_DZ = "dz = output(points, mul(sub(hot, p), c[:, None].expand_as(z)))"


def _regions(old: str, new: str) -> tuple[Edit, ...]:
    return (Line("regions", old, new),)


def _head(old: str, new: str) -> tuple[Edit, ...]:
    return (Line("head", old, new),)


def _narrow(text: str) -> str:
    return f'cast({text}, "bfloat16")'


def _wide_row_sum(_: Any) -> Callable[..., Any]:
    return lambda points, a, b: (a.double() * b.double()).sum(-1).float()


def _bf16_row_sum(_: Any) -> Callable[..., Any]:
    def add_up(points: Any, a: Any, b: Any) -> Any:
        total = torch.zeros_like(a[:, 0])
        for k in range(a.shape[1]):
            total = cast_bf16(total + a[:, k] * b[:, k])
        return total

    return add_up


_SQUARES = f"squares = {_narrow('mul(x, x)')}; total = row_sum(points, squares, torch.ones_like(squares)); "
NORM: tuple[Variation, ...] = (
    Variation("merge order", "one chain over the row in descending order", (Chain(descending),), entry=lane_count(1)),
    Variation("precision", "squares rounded to bfloat16 before they are added", _regions(_MEAN, _SQUARES + "mean = div(total, width)")),
    Variation("precision", "squares rounded to bfloat16 before they are added, and their sum", _regions(_MEAN, _SQUARES + f"mean = div({_narrow('total')}, width)")),
    Variation("precision", "a sum of squares that is kept in bfloat16", _regions(_MEAN, f"mean = div({_narrow('row_sum(points, x, x)')}, width)")),
    Variation("precision", "squares added one after the other in bfloat16", (Function("row_sum", _bf16_row_sum, ("regions",)),)),
    Variation("precision", "a mean that is kept in bfloat16", _regions(_MEAN, f"mean = {_narrow('div(row_sum(points, x, x), width)')}")),
    Variation("precision", "a sum over the row in float64", (Function("row_sum", _wide_row_sum, ("regions", "optimizer")),)),
    Variation("precision", "rows rounded to bfloat16 before their squares are added", _regions(_MEAN, f"mean = div(row_sum(points, {_narrow('x')}, {_narrow('x')}), width)")),
    Variation("primitives", "a product with 1/H instead of a division by H", _regions(_MEAN, "mean = mul(row_sum(points, x, x), div(torch.ones_like(width), width))")),
    Variation("primitives", "a reciprocal square root that is rounded once", _regions(_INVERSE, "inverse = (add(mean, eps).double() ** -0.5).float()")),
    Variation("primitives", "the square root of a reciprocal", _regions(_INVERSE, "inverse = sqrt(div(torch.ones_like(mean), add(mean, eps)))")),
    Variation("primitives", "an epsilon that is added after the square root", _regions(_INVERSE, "inverse = div(torch.ones_like(mean), add(sqrt(mean), eps))")),
    Variation("primitives", "no epsilon", _regions(_INVERSE, "inverse = div(torch.ones_like(mean), sqrt(mean))")),
    Variation("primitives", "a division by the root instead of a product with its reciprocal", (
        Line("regions", _INVERSE, "root = sqrt(add(mean, eps)); inverse = div(torch.ones_like(mean), root)"),
        Line("regions", _NORM, "return output(points, mul(div(x, root[:, None].expand_as(x)), weight[None, :])), inverse"))),
    Variation("primitives", "the weight multiplied before the scale", _regions(_NORM, "return output(points, mul(mul(x, weight[None, :].expand_as(x)), inverse[:, None])), inverse")),
    Variation("primitives", "scale and weight multiplied first", _regions(_NORM, "return output(points, mul(x, mul(inverse[:, None], weight[None, :]))), inverse")),
    Variation("rounding", "normed values that are rounded to bfloat16 before the weight", _regions(_NORM, f"return output(points, mul({_narrow('mul(x, inverse[:, None])')}, weight[None, :])), inverse")),
    Variation("rounding", "a scale that is rounded to bfloat16", _regions(_INVERSE, _INVERSE.replace("div(", 'cast(div(', 1) + ', "bfloat16")')),
)  # fmt: skip

NORM_BACKWARD: tuple[Variation, ...] = (
    Variation("primitives", "the gradient's last formula without a fused multiply-add", _regions(_DX, "dx = mul(inverse[:, None].expand_as(x), sub(g, mul(xh, c[:, None].expand_as(x))))")),
    Variation("primitives", "the weight gradient without a fused multiply-add", _regions(_RUNNING, "running = add(mul(dy[t], xh[t]), running)")),
    Variation("merge order", "the weight gradient over tokens in descending order", (
        Line("regions", "        for t in range(len(dy)):\n            running = fused", "        for t in reversed(range(len(dy))):\n            running = fused"),)),
    Variation("split", "the weight gradient of each call from +0, added to the chain it should have continued", (
        Line("regions", "running = self.interpreter.tensor(self.grad(host, name))\n            self.grad(host, name)[:] = array(self._continued(wgrad, dy, xh, running))", "running = torch.zeros_like(weight)\n            self.grad(host, name)[:] = self.grad(host, name) + array(self._continued(wgrad, dy, xh, running))"),)),
    Variation("precision", "the weight gradient in float64", _regions(_RUNNING, "running = (dy[t].double() * xh[t].double()) + running.double()") + (
        Line("regions", "array(self._continued(wgrad, dy, xh, running))", "array(self._continued(wgrad, dy, xh, running).float())"),)),
    Variation("precision", "the weight gradient in bfloat16", _regions(_RUNNING, f"running = {_narrow('fused(dy[t], xh[t], running)')}")),
    Variation("rounding", "normed values that are rounded to bfloat16 in the gradient", _regions(_XH, f"xh = {_narrow('mul(x, inverse[:, None])')}")),
    Variation("rounding", "the gradient times the weight rounded to bfloat16", _regions("g = mul(dy, weight[None, :])", f"g = {_narrow('mul(dy, weight[None, :])')}")),
    Variation("rounding", "normed values that are rounded to bfloat16 in the weight gradient", _regions(_RUNNING, f"running = fused(dy[t], {_narrow('xh[t]')}, running)")),
)  # fmt: skip

SWIGLU: tuple[Variation, ...] = (
    Variation("rounding", "SiLU of the gate rounded to bfloat16 before the product with up", _regions(_SILU, _SILU.replace("mul(gate, sg)", _narrow("mul(gate, sg)")))),
    Variation("rounding", "a sigmoid that is rounded to bfloat16", _regions(_SIGMOID, _SIGMOID.replace("return div", "return cast(div") + ', "bfloat16")')),
    Variation("primitives", "a product that is associated otherwise", _regions(_SILU, _SILU.replace("mul(mul(gate, sg), up)", "mul(gate, mul(sg, up))"))),
    Variation("primitives", "gate times up first", _regions(_SILU, _SILU.replace("mul(mul(gate, sg), up)", "mul(mul(gate, up), sg)"))),
    Variation("primitives", "a library's exp instead of exp2.full(x * LOG2E)", _regions(_SIGMOID, "return div(one, add(one, torch.exp((-x).double()).float()))")),
    Variation("primitives", "a division of the gate instead of a product with its sigmoid", _regions(_SILU, _SILU.replace("mul(gate, sg)", 'div(gate, add(torch.ones_like(gate), primitive(points.primitive("exp2"))(mul(-gate, torch.full((), LOG2E).expand_as(gate)))))'))),
    Variation("precision", "an exponent that is multiplied in float64", _regions(_SIGMOID, _SIGMOID.replace("mul(-x, log2e)", "(-x.double() * 1.4426950408889634).float()"))),
    Variation("precision", "a formula evaluated in float64", _regions(_SILU, "return (array(output(points, (gate.double() * sg.double() * up.double()).float())),), (gate, up)")),
)  # fmt: skip

SWIGLU_BACKWARD: tuple[Variation, ...] = (
    Variation("primitives", "the slope without a fused multiply-add", _regions(_DGATE, _DGATE.replace("fma32(gate, sub(one, sg), one)", "add(mul(gate, sub(one, sg)), one)"))),
    Variation("primitives", "a product that is associated otherwise", _regions(_DGATE, "d_gate = mul(ds, mul(up, mul(sg, fma32(gate, sub(one, sg), one))))")),
    Variation("primitives", "the product of gradient and SiLU associated otherwise", _regions("d_up = mul(ds, mul(gate, sg))", "d_up = mul(mul(ds, gate), sg)")),
    Variation("rounding", "SiLU rounded to bfloat16 in the gradient", _regions("d_up = mul(ds, mul(gate, sg))", f"d_up = mul(ds, {_narrow('mul(gate, sg)')})")),
    Variation("rounding", "the gradient of SiLU rounded to bfloat16", _regions(_DGATE, _DGATE.replace("mul(ds, up)", _narrow("mul(ds, up)")))),
)  # fmt: skip

ROPE: tuple[Variation, ...] = (
    Variation("primitives", "a rotation without a fused multiply-add", _regions(_ROTATED, "rotated = torch.cat([sub(mul(first, c), mul(second, s)), add(mul(second, c), mul(first, s))], dim=-1)")),
    Variation("primitives", "a rotation whose other product is fused", _regions(_ROTATED, "rotated = torch.cat([fma32(-second, s, mul(first, c)), fma32(first, s, mul(second, c))], dim=-1)")),
    Variation("rounding", "products of the rotation rounded to bfloat16", _regions(_ROTATED, _ROTATED.replace("mul(second, s)", _narrow("mul(second, s)")).replace("mul(first, s)", _narrow("mul(first, s)")))),
    Variation("rounding", "rotary tables rounded to bfloat16", _regions("c, s = cos.expand_as(first), sin.expand_as(first)", f"c, s = {_narrow('cos')}.expand_as(first), {_narrow('sin')}.expand_as(first)")),
    Variation("precision", "a rotation in float64", _regions(_ROTATED, "rotated = torch.cat([(first.double() * c - second.double() * s).float(), (second.double() * c + first.double() * s).float()], dim=-1)")),
    Variation("dependency", "positions counted from the batch's first row, not the sequence's", (
        Line("regions", "host.rope.cos[host.batch.positions]", "host.rope.cos[np.arange(len(host.batch.positions))]"),
        Line("regions", "host.rope.sin[host.batch.positions]", "host.rope.sin[np.arange(len(host.batch.positions))]"))),
)  # fmt: skip

LINEAR: tuple[Variation, ...] = (
    Variation("dependency", "a projection without its bias", _regions(_PROJECTED, _PROJECTED.replace("bias=bias", "bias=None"))),
    Variation("rounding", "a bias that is added after the rounding", _regions(_PROJECTED, "y = output(points, matmul(points, x, self.interpreter.weight(host, name))); y = array(y if bias is None else output(points, add(y, bias)))")),
    Variation("merge order", "a chain that starts from the bias", _regions(_PROJECTED, "y = array(output(points, matmul(points, x, self.interpreter.weight(host, name)) if bias is None else chain(points, x[:, None, :], self.interpreter.weight(host, name)[None], bias.expand(len(x), -1).contiguous())))")),
)  # fmt: skip

_CHAINS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("merge order", "a chain in descending order", descending),
    ("split", "a chain from +0 that is added to the one it should have continued", from_zero),
    *(("split", f"chains that start anew every {n} elements", cut(n)) for n in (8, 16, 32, 64, 128, 256, 512)),
    ("precision", "an accumulator in float64", in_float64),
    ("precision", "an accumulator in bfloat16", in_bf16),
    *(
        ("precision", f"an accumulator that rests in bfloat16 every {n} elements", rounded_state(n))
        for n in (16, 64, 512)
    ),
    ("precision", "operands rounded to bfloat16 before the products", narrow_inputs),
    *(("precision", f"operands {what} before the products", tf32_inputs(mode)) for mode, what in TF32),
    ("primitives", "products and sums that are rounded apart (no fused multiply-add)", unfused),
)


def _weight_gradient(make: Callable[[Any], Any]) -> Edit:
    """Another chain of the weight gradient alone."""

    def replaced(_: Any) -> Callable[..., Any]:
        def chain(points: Any, dy: Any, x: Any, running: Any) -> Any:
            return make(multiply_accumulate(points).chain)(dy.T[:, None, :], x.T[None, :, :], running)

        return chain

    return Function("continued", replaced, ("regions", "head"))


def _all_but_the_weight_gradient() -> Edit:
    return Function("continued", lambda _: continued, ("regions", "head"))


CHAINS_APART: tuple[Variation, ...] = (
    *(Variation(point, f"{what}, in the weight gradient", (_weight_gradient(make),)) for point, what, make in _CHAINS),
    *(
        Variation(point, f"{what}, in the gradient of the input", (Chain(make), _all_but_the_weight_gradient()))
        for point, what, make in _CHAINS
    ),
)

LINEAR_BACKWARD: tuple[Variation, ...] = CHAINS_APART + (
    Variation("merge order", "the fused gradient's features in the order [q, k, v] or [gate, up], not by group or leaf", _regions("weights, fused = weights[order.to(weights.device)], fused[:, order.to(fused.device)]", "pass")),
    Variation("merge order", "the bias gradient over tokens in descending order", _regions("array(add_chain(dy, start))", "array(add_chain(dy.flip(0), start))")),
    Variation("split", "the bias gradient of each call from +0, added to the chain it should have continued", _regions("array(add_chain(dy, start))", "array(add(add_chain(dy), start))")),
)  # fmt: skip

EMBEDDING_BACKWARD: tuple[Variation, ...] = (
    Variation("merge order", "tokens in descending order", _regions(_TOKENS, "for token, row in zip(saved.tolist()[::-1], rows.flip(0), strict=True):")),
    Variation("split", "the rows of each call added from +0, then to the gradient they should have continued", (
        Line("regions", "            grad[token] = plus(grad[token], row)\n", "            part[token] = plus(part[token], row)\n        grad = plus(grad, part)\n"),
        Line("regions", "rows = self.interpreter.tensor(grads[0])\n", "rows = self.interpreter.tensor(grads[0])\n        part = torch.zeros_like(grad)\n"))),
    Variation("precision", "rows added in bfloat16", _regions("grad[token] = plus(grad[token], row)", f"grad[token] = {_narrow('plus(grad[token], row)')}")),
    Variation("precision", "rows added in float64", (
        Line("regions", "grad[token] = plus(grad[token], row)", "grad[token] = grad[token] + row.double()"),
        Line("regions", "grad = self.interpreter.tensor(host.gradients.embedding(region.weights[0]))", "grad = self.interpreter.tensor(host.gradients.embedding(region.weights[0])).double()"),
        Line("regions", "host.gradients.embedding(region.weights[0])[:] = array(grad)", "host.gradients.embedding(region.weights[0])[:] = array(grad.float())"))),
)  # fmt: skip

HEAD: tuple[Variation, ...] = (
    Variation("primitives", "logits multiplied with 1/temperature", _head(_LOGITS, "return mul(z, div(scalar(1.0, z), scalar(temperature, z)))")),
    Variation("primitives", "a logarithm of a library instead of log2.full(x) * LN2", _head("log_sum = mul(log2(s), scalar(LN2, s))", "log_sum = torch.log(s.double()).float()")),
    Variation("merge order", "maximum and log-sum added before they are subtracted", _head(_LOGPROB, "logprob = sub(chosen, largest + log_sum)")),
    Variation("merge order", "leaves of a shard in descending order", _head("        difference = sub(m[:, :, leaf], largest)", "        leaf = m.shape[2] - 1 - leaf; difference = sub(m[:, :, leaf], largest)")),
    Variation("split", "every leaf rescaled to the row's maximum before its sum", _head("difference = sub(padded, m[:, :, None].expand_as(padded))", "m = m.amax(1, keepdim=True).expand_as(m).contiguous(); difference = sub(padded, m[:, :, None].expand_as(padded))")),
    Variation("dependency", "padded columns that count as logits of 0", _head("    leaves = _leaves(points, z, exp2)", "    z = torch.nn.functional.pad(z, (0, -z.shape[1] % int(points.constant('padding_multiple')))); leaves = _leaves(points, z, exp2)")),
    Variation("rounding", "logits that are rounded to bfloat16", _head(_LOGITS, "from rlkernel.reference.arith import cast_bf16; return div(cast_bf16(z), scalar(temperature, z))")),
    Variation("rounding", "divided logits that are rounded to bfloat16", _head(_LOGITS, "from rlkernel.reference.arith import cast_bf16; return cast_bf16(div(z, scalar(temperature, z)))")),
    Variation("rounding", "a log-probability that is rounded to bfloat16", _head(_LOGPROB, f"from rlkernel.reference.arith import cast; {_LOGPROB.replace('sub(', 'cast(sub(', 1)}, 'bfloat16')")),
    Variation("primitives", "the rescaled moment without a fused multiply-add", _head("fma32(s[:, :, leaf], difference, u[:, :, leaf]))", "mul(s[:, :, leaf], difference) + u[:, :, leaf])")),
    Variation("primitives", "rescaled sums without a fused multiply-add", _head("fma32(s[:, :, leaf], w, total)", "mul(s[:, :, leaf], w) + total")),
    Variation("precision", "sums of leaves in float64", _head("return _Sums(m, tree(e, 2), tree(term, 2))", "return _Sums(m, e.double().sum(2).float(), term.double().sum(2).float())")),
    Variation("precision", "sums of leaves kept in bfloat16", _head("return _Sums(m, tree(e, 2), tree(term, 2))", "from rlkernel.reference.arith import cast_bf16; return _Sums(m, cast_bf16(tree(e, 2)), cast_bf16(tree(term, 2)))")),
)  # fmt: skip

HEAD_BACKWARD: tuple[Variation, ...] = CHAINS_APART + (
    Variation("rounding", "gradients of the logits that are not rounded", entry=not_rounded("output"), only=("logprob",)),
    Variation("rounding", "the gradient of the hidden state that is not rounded", entry=not_rounded("output"), only=("lm_head",)),
    Variation("rounding", "probabilities rounded to bfloat16 before the difference", _head(_P, f"from rlkernel.reference.arith import cast_bf16; {_P.replace('exp2(', 'cast_bf16(exp2(', 1)})")),
    Variation("merge order", "maximum and log-sum added before they are subtracted", _head(_P, "p = exp2(mul(sub(z, m + log_sum), scalar(LOG2E, z)))")),
    Variation("primitives", "the difference multiplied before the temperature divides", _head(_DZ, "dz = output(points, div(mul(sub(hot, p), self.interpreter.tensor(coefficient)[:, None].expand_as(z)), scalar(temperature, z)))")),
    Variation("primitives", "a coefficient multiplied with 1/temperature", _head("c = div(self.interpreter.tensor(coefficient), scalar(temperature, z[:, 0]))", "c = mul(self.interpreter.tensor(coefficient), div(scalar(1.0, z[:, 0]), scalar(temperature, z[:, 0])))")),
    Variation("primitives", "a gradient without the temperature", _head("c = div(self.interpreter.tensor(coefficient), scalar(temperature, z[:, 0]))", "c = self.interpreter.tensor(coefficient)")),
)  # fmt: skip
