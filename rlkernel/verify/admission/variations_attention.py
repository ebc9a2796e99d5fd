"""Deviations of attention, of the optimizer and of the loss: a line of the interpreter written otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlkernel.reference.arith import cast_bf16, mul
from rlkernel.reference.attention import bits_constant
from rlkernel.reference.reductions import chain
from rlkernel.verify.admission.variants import Edit, Function, Line, Variation
from rlkernel.verify.admission.variations import (
    also_rounded,
    constant,
    exact_exp2,
    halves_tree,
    linear_tree,
    not_rounded,
    other_weights_exp2,
)

_MASK = "torch.arange(keys, device=positions.device)[None, :] <= positions[:, None]"
_ACC = "acc = visible_chain(points, p, v.T.contiguous(), start=mul(part.acc, alpha[:, None]), valid=mask)"
_TOTAL = "total = torch.where(mask[:, j], add(total, p[:, j]), total)"
_KEYS = "        for j in range(p.shape[1]):\n            total"
_WEIGHTS = "p = weights_exp2(torch.where(mask, sub(s, new[:, None]), torch.zeros_like(s)))"
_PART_ACC = "part.acc = torch.where(active[:, None], acc, part.acc)"
_DIVIDED = "result = div(out, total[:, None].expand_as(out))"
_SPLITS = "    total, out = torch.zeros_like(parts[0].l), torch.zeros_like(parts[0].acc)\n    for part in parts:"
_MASKED = "    p = torch.where(mask, p, torch.zeros_like(p))\n    if points.split.lanes == 1:"
_DS = "ds = rounded(mul(p, sub(dp, delta[:, None].expand_as(dp))), narrow_s)"
_P = "p = weights_exp2(torch.where(mask, sub(s, lse2[:, h, None]), torch.zeros_like(s)))"
_DQ = "dq[:, h] = rounded(mul(visible_chain(points, ds, k.T.contiguous(), valid=mask), scale), narrow)"
_HEADS = "    for h in range(group):\n        s = scores"


def _attention(old: str, new: str) -> tuple[Edit, ...]:
    return (Line("attention", old, new),)


def _optimizer(old: str, new: str) -> tuple[Edit, ...]:
    return (Line("optimizer", old, new),)


def _loss(old: str, new: str) -> tuple[Edit, ...]:
    return (Line("loss", old, new),)


def _descending_visible(original: Any) -> Callable[..., Any]:
    def chain(points: Any, a: Any, b: Any, *, valid: Any, start: Any = None) -> Any:
        return original(points, a.flip(1), b.flip(1), valid=valid.flip(1), start=start)

    return chain


def _from_zero_visible(original: Any) -> Callable[..., Any]:
    def chain(points: Any, a: Any, b: Any, *, valid: Any, start: Any = None) -> Any:
        part = original(points, a, b, valid=valid)
        return part if start is None else start + part

    return chain


def _cut_visible(size: int) -> Callable[[Any], Callable[..., Any]]:
    def make(original: Any) -> Callable[..., Any]:
        def chain(points: Any, a: Any, b: Any, *, valid: Any, start: Any = None) -> Any:
            total = torch.zeros(len(a), len(b)) if start is None else start
            for first in range(0, a.shape[1], size):
                piece = slice(first, first + size)
                part = original(points, a[:, piece], b[:, piece], valid=valid[:, piece])
                total = part if first == 0 and start is None else total + part
            return total

        return chain

    return make


def _narrow_visible(original: Any) -> Callable[..., Any]:
    from rlkernel.reference.arith import cast_bf16

    def chain(points: Any, a: Any, b: Any, *, valid: Any, start: Any = None) -> Any:
        return cast_bf16(original(points, a, b, valid=valid, start=start))

    return chain


def _wide_visible(_: Any) -> Callable[..., Any]:
    def chain(points: Any, a: Any, b: Any, *, valid: Any, start: Any = None) -> Any:
        products = torch.where(valid[:, None, :], a.double()[:, None, :] * b.double()[None, :, :], 0.0).sum(-1)
        return (products if start is None else start.double() + products).float()

    return chain


def _unfused_visible(_: Any) -> Callable[..., Any]:
    def chain(points: Any, a: Any, b: Any, *, valid: Any, start: Any = None) -> Any:
        total = torch.zeros(len(a), len(b)) if start is None else start
        for k in range(a.shape[1]):
            total = torch.where(valid[:, k, None], total + a[:, k, None] * b[None, :, k], total)
        return total

    return chain


def _scores(make: Callable[[Any, Any], Any]) -> tuple[Edit, ...]:
    """Scores made otherwise of the dot products and the scale."""

    def replaced(_: Any) -> Callable[..., Any]:
        def scores(points: Any, q: Any, k: Any) -> Any:
            dot = chain(points, q[:, None, :], k[None, :, :])
            return make(dot, torch.full_like(dot, bits_constant(points, "scale2")))

        return scores

    return (Function("scores", replaced, ("attention",)),)


def _scaled_query(original: Any) -> Callable[..., Any]:
    def scores(points: Any, q: Any, k: Any) -> Any:
        scaled = mul(q, torch.full_like(q, bits_constant(points, "scale2")))
        return chain(points, scaled[:, None, :], k[None, :, :])

    return scores


def _visible(make: Callable[[Any], Any]) -> tuple[Edit, ...]:
    return (Function("visible_chain", make, ("attention",)),)


def _weights(function: Callable[[Any], Any]) -> tuple[Edit, ...]:
    def by_name(original: Any) -> Callable[[str], Any]:
        return lambda name: function if name == "weights" else original(name)

    old = 'primitive(points.primitive("exp2")), primitive(points.primitive("weights_exp2"))'
    new = 'primitive(points.primitive("exp2")), primitive("weights")'
    return (Line("attention", old, new), Function("primitive", by_name, ("attention",)))


ATTENTION: tuple[Variation, ...] = (
    Variation("dependency", "keys before the query's own only", _attention(_MASK, _MASK.replace("<=", "<"))),
    Variation("dependency", "one key after the query's own as well", _attention(_MASK, _MASK + " + 1")),
    Variation("dependency", "keys after the query's own as well", _attention(_MASK, f"({_MASK}) | True")),
    Variation("dependency", "masked keys whose weight is tiny, not +0", (
        Line("attention", _MASKED, "    p = torch.where(mask, p, torch.full_like(p, 2.0**-126))\n    if points.split.lanes == 1:"),
        Line("attention", _TOTAL, "total = add(total, p[:, j])"),
        Line("attention", _ACC, _ACC.replace("valid=mask", "valid=torch.ones_like(mask)")))),
    *(Variation("split", f"key blocks of {n}", entry=constant("key_block", str(n))) for n in (16, 32, 128, 256)),
    Variation("split", "a block's products summed from +0, then added to the accumulator", _visible(_from_zero_visible)),
    *(Variation("split", f"chains over keys that start anew every {n} keys", _visible(_cut_visible(n))) for n in (8, 16, 32)),
    Variation("merge order", "keys of a block in descending order", _visible(_descending_visible)),
    Variation("merge order", "the row sum over a block's keys in descending order", _attention(_KEYS, _KEYS.replace("range(p.shape[1])", "reversed(range(p.shape[1]))"))),
    Variation("merge order", "the row sum of a block as a tree", _attention("        for j in range(p.shape[1]):\n            total = torch.where(mask[:, j], add(total, p[:, j]), total)", "        total = add(total, tree(p, 1))")),
    Variation("merge order", "splits in descending order", _attention(_SPLITS, _SPLITS.replace("in parts:", "in parts[::-1]:"))),
    Variation("split", "a row sum of a block from +0, then added", _attention("        total = mul(part.l, alpha)\n        for j in range(p.shape[1]):\n            total = torch.where(mask[:, j], add(total, p[:, j]), total)", "        total = add(mul(part.l, alpha), add_chain(p.T.contiguous()))")),
    Variation("precision", "an accumulator over keys in float64", _visible(_wide_visible)),
    Variation("precision", "an accumulator that rests in bfloat16 between blocks", _attention(_PART_ACC, "part.acc = torch.where(active[:, None], cast(acc, \"bfloat16\"), part.acc)")),
    Variation("precision", "a row sum that rests in bfloat16 between blocks", _attention("part.l = torch.where(active, total, part.l)", "part.l = torch.where(active, cast(total, \"bfloat16\"), part.l)")),
    Variation("precision", "a row sum in float64", _attention(_TOTAL, "total = torch.where(mask[:, j], total.double() + p[:, j].double(), total.double())") + _attention("part.l = torch.where(active, total, part.l)", "part.l = torch.where(active, total.float(), part.l)")),
    Variation("rounding", "scores rounded to bfloat16 before the softmax", _scores(lambda dot, scale2: cast_bf16(mul(dot, scale2)))),
    Variation("rounding", "dot products rounded to bfloat16 before the scale", _scores(lambda dot, scale2: mul(cast_bf16(dot), scale2))),
    Variation("rounding", "weights that are not rounded", entry=not_rounded("weights")),
    Variation("rounding", "weights that are rounded to bfloat16", entry=also_rounded("weights")),
    Variation("rounding", "a row sum of weights before their rounding", _attention('    if (narrow := points.rounds("weights")) is not None:\n        p = cast(p, narrow)\n    p = torch', '    exact = torch.where(mask, p, torch.zeros_like(p))\n    if (narrow := points.rounds("weights")) is not None:\n        p = cast(p, narrow)\n    p = torch') + _attention(_TOTAL, _TOTAL.replace("p[:, j]", "exact[:, j]"))),
    Variation("rounding", "splits rounded to bfloat16 before their merge", _attention("out = torch.where(part.seen[:, None], fma32(part.acc,", "out = torch.where(part.seen[:, None], fma32(cast(part.acc, \"bfloat16\"),")),
    Variation("primitives", "the exponential of weights is another one", entry=other_weights_exp2),
    Variation("primitives", "the exponential of weights is a library's", _weights(exact_exp2)),
    Variation("primitives", "scale and subtraction contracted to a fused multiply-add", (
        *_scores(lambda dot, scale2: dot),
        Line("attention", "hidden = torch.where(mask, s,", "scale2 = torch.full((), bits_constant(points, \"scale2\")).expand_as(s); hidden = torch.where(mask, mul(s, scale2),"),
        Line("attention", _WEIGHTS, "p = weights_exp2(torch.where(mask, fma32(s, scale2, -new[:, None].expand_as(s)), torch.zeros_like(s)))"))),
    Variation("primitives", "a query that is scaled before its dot products", (Function("scores", _scaled_query, ("attention",)),)),
    Variation("primitives", "weights and values without a fused multiply-add", _visible(_unfused_visible)),
    Variation("primitives", "sums of splits without a fused multiply-add", _attention("total = torch.where(part.seen, fma32(part.l, w, total), total)", "total = torch.where(part.seen, add(mul(part.l, w), total), total)")),
    Variation("primitives", "a product with the reciprocal of the row sum", _attention(_DIVIDED, "result = mul(out, div(torch.ones_like(total), total)[:, None].expand_as(out))")),
)  # fmt: skip

ATTENTION_BACKWARD: tuple[Variation, ...] = (
    Variation("dependency", "keys before the query's own only", _attention(_MASK, _MASK.replace("<=", "<"))),
    Variation("dependency", "one key after the query's own as well", _attention(_MASK, _MASK + " + 1")),
    Variation("merge order", "chains of dq over keys, or of dk and dv over rows, in descending order", _visible(_descending_visible)),
    Variation("merge order", "heads of the group in descending order", _attention(_HEADS, _HEADS.replace("range(group)", "reversed(range(group))"))),
    Variation("split", "a chain from +0 for each head, added to the sum of the others", _visible(_from_zero_visible)),
    *(Variation("split", f"chains that start anew every {n} elements", _visible(_cut_visible(n))) for n in (16, 32, 64, 128)),
    Variation("precision", "accumulators of the gradients in float64", _visible(_wide_visible)),
    Variation("precision", "accumulators of the gradients that rest in bfloat16 between heads", _visible(_narrow_visible)),
    Variation("rounding", "score gradients that are not rounded", entry=not_rounded("score gradients")),
    Variation("rounding", "score gradients that are rounded to bfloat16", entry=also_rounded("score gradients")),
    Variation("primitives", "the exponential of weights is another one in the gradient alone", entry=other_weights_exp2),
    Variation("rounding", "weights that are not rounded in the gradient alone", entry=not_rounded("weights")),
    Variation("rounding", "weights that are rounded to bfloat16 in the gradient alone", entry=also_rounded("weights")),
    Variation("rounding", "weights that are not rounded", entry=not_rounded("weights"), only=("attention",)),
    Variation("rounding", "weights that are rounded to bfloat16", entry=also_rounded("weights"), only=("attention",)),
    Variation("rounding", "weights that are rounded before the score gradients", _attention(_DS, _DS.replace("mul(p,", "mul(rounded(p, narrow_p),"))),
    Variation("rounding", "the scale multiplied onto a rounded sum", _attention(_DQ, "dq[:, h] = rounded(mul(rounded(visible_chain(points, ds, k.T.contiguous(), valid=mask), narrow), scale), narrow)")),
    Variation("rounding", "delta rounded to bfloat16", _attention("delta = _row_dot(points, dout[:, h], out[:, h])", "delta = cast(_row_dot(points, dout[:, h], out[:, h]), \"bfloat16\")")),
    Variation("primitives", "the exponential of weights is another one", entry=other_weights_exp2, only=("attention",)),
    Variation("primitives", "scale and subtraction contracted to a fused multiply-add", _attention(_P, "p = weights_exp2(torch.where(mask, fma32(chain(points, q[:, h][:, None, :], k[None, :, :]), torch.full((), bits_constant(points, \"scale2\")).expand_as(s), -lse2[:, h, None].expand_as(s)), torch.zeros_like(s)))")),
    Variation("primitives", "products and sums without a fused multiply-add", _visible(_unfused_visible)),
    Variation("primitives", "the scale multiplied onto the score gradients", (
        Line("attention", _DS, "ds = rounded(mul(mul(p, sub(dp, delta[:, None].expand_as(dp))), scale), narrow_s)"),
        Line("attention", _DQ, "dq[:, h] = rounded(visible_chain(points, ds, k.T.contiguous(), valid=mask), narrow)"),
        Line("attention", "return dq, rounded(mul(dk, scale), narrow), rounded(dv, narrow)", "return dq, rounded(dk, narrow), rounded(dv, narrow)"))),
    Variation("primitives", "a product spread over the difference", _attention(_DS, "ds = rounded(sub(mul(p, dp), mul(p, delta[:, None].expand_as(dp))), narrow_s)")),
    Variation("primitives", "delta without a fused multiply-add", _attention("total = fused(a[:, d], b[:, d], total)", "total = add(mul(a[:, d], b[:, d]), total)")),
    Variation("merge order", "delta in descending order", _attention("for d in range(a.shape[1]):", "for d in reversed(range(a.shape[1])):")),
)  # fmt: skip

_STEP = "step = div(mul(m, constant(scalars.correction1)), add(root, constant(scalars.eps)))"
_ROOT = "root = sqrt(mul(v, constant(scalars.correction2)))"
_MASTER = "master = sub(master, mul(constant(scalars.lr), decayed))"
_DECAYED = "decayed = fma32(constant(scalars.weight_decay), master, step)"
_V = "v = fma32(constant(scalars.beta2), v, mul(constant(scalars.one_minus_beta2), mul(g, g)))"
_M = "m = fma32(constant(scalars.beta1), m, mul(constant(scalars.one_minus_beta1), g))"
_RETURN = "return master, m, v, master if narrow is None else cast(master, narrow)"

ADAMW: tuple[Variation, ...] = (
    Variation("primitives", "an epsilon under the square root", _optimizer(_ROOT, "root = sqrt(add(mul(v, constant(scalars.correction2)), constant(scalars.eps)))") + _optimizer(_STEP, "step = div(mul(m, constant(scalars.correction1)), root)")),
    Variation("primitives", "moments that are multiplied by the correction after the root", _optimizer(_ROOT, "root = mul(sqrt(v), sqrt(constant(scalars.correction2)))")),
    Variation("primitives", "the square of the gradient multiplied otherwise", _optimizer(_V, _V.replace("mul(constant(scalars.one_minus_beta2), mul(g, g))", "mul(mul(constant(scalars.one_minus_beta2), g), g)"))),
    Variation("primitives", "the first moment without a fused multiply-add", _optimizer(_M, "m = add(mul(constant(scalars.beta1), m), mul(constant(scalars.one_minus_beta1), g))")),
    Variation("primitives", "the second moment without a fused multiply-add", _optimizer(_V, "v = add(mul(constant(scalars.beta2), v), mul(constant(scalars.one_minus_beta2), mul(g, g)))")),
    Variation("primitives", "the weight decay without a fused multiply-add", _optimizer(_DECAYED, "decayed = add(mul(constant(scalars.weight_decay), master), step)")),
    Variation("primitives", "the last subtraction contracted to a fused multiply-add", _optimizer(_MASTER, "master = fma32(-constant(scalars.lr), decayed, master)")),
    Variation("primitives", "decay and step subtracted apart", _optimizer(_DECAYED, "decayed = step") + _optimizer(_MASTER, "master = sub(sub(master, mul(constant(scalars.lr), mul(constant(scalars.weight_decay), master))), mul(constant(scalars.lr), decayed))")),
    Variation("rounding", "a master that is rounded to the model's dtype", _optimizer(_RETURN, "master = master if narrow is None else cast(master, narrow); return master, m, v, master")),
    Variation("rounding", "a master that is rounded to bfloat16", _optimizer(_RETURN, "master = cast(master, \"bfloat16\"); return master, m, v, master")),
    Variation("rounding", "a weight that is not rounded", _optimizer(_RETURN, "return master, m, v, master")),
    Variation("rounding", "a gradient that is rounded to bfloat16", _optimizer("g = mul(gradient, constant(scalars.clip))", "g = mul(cast(gradient, \"bfloat16\"), constant(scalars.clip))")),
    Variation("precision", "moments kept in bfloat16", _optimizer(_RETURN, "m, v = cast(m, \"bfloat16\"), cast(v, \"bfloat16\"); return master, m, v, master if narrow is None else cast(master, narrow)")),
    Variation("precision", "the step in float64", _optimizer(_STEP, "step = ((m.double() * constant(scalars.correction1)) / (root.double() + constant(scalars.eps))).float()")),
    Variation("dependency", "a gradient that is not clipped", _optimizer("g = mul(gradient, constant(scalars.clip))", "g = gradient")),
)  # fmt: skip

_NAMES = "for name in sorted(gradients):"
GRADIENT_NORM: tuple[Variation, ...] = (
    Variation("merge order", "tensors in descending order of their names", _optimizer(_NAMES, "for name in sorted(gradients, reverse=True):")),
    Variation("merge order", "leaves of a tensor merged one after the other instead of in a tree", (Function("tree", linear_tree, ("optimizer",)),)),
    Variation("merge order", "a tree of leaves that pairs leaf i with leaf i + n/2", (Function("tree", halves_tree, ("optimizer",)),)),
    Variation("merge order", "tensors in the order in which they were given", _optimizer(_NAMES, "for name in gradients:")),
    Variation("precision", "the sum over tensors in float64", _optimizer(_NAMES, "return torch.sqrt(sum(sum_of_squares(points, g).double() for _, g in sorted(gradients.items()))).float()\n    for name in sorted(gradients):")),
    Variation("precision", "the square root in float64 of an unrounded sum", _optimizer(_NAMES, "return torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values())).float()\n    for name in sorted(gradients):")),
    Variation("primitives", "norms of tensors that are squared again", _optimizer("total = plus(torch.zeros_like(part) if total is None else total, part)", "part = mul(sqrt(part), sqrt(part)); total = plus(torch.zeros_like(part) if total is None else total, part)")),
    Variation("primitives", "clipping by max_norm / (norm + 1e-6)", _optimizer("torch.where(norm > limit, div(limit, norm), torch.ones_like(norm))", "torch.where(norm > limit, div(limit, add(norm, torch.full_like(norm, float(np.float32(1e-6))))), torch.ones_like(norm))")),
    Variation("primitives", "a square root that is not correctly rounded", _optimizer("return sqrt(total)", "return mul(total, div(torch.ones_like(total), sqrt(total)))")),
)  # fmt: skip

LOSS: tuple[Variation, ...] = (
    Variation("primitives", "a library's exp of the difference", _loss("return primitive(points.primitive(\"exp2\"))(mul(sub(new, old), LOG2E))", "return torch.exp(sub(new, old).double()).float()")),
    Variation("primitives", "a KL coefficient in a fused multiply-add", _loss("add(policy, mul(constants.beta, kl)), add(slope, mul(constants.beta, kl_slope))", "(policy.double() + constants.beta * kl.double()).float(), (slope.double() + constants.beta * kl_slope.double()).float()")),
    Variation("precision", "a difference of log-probabilities in float64", _loss("return primitive(points.primitive(\"exp2\"))(mul(sub(new, old), LOG2E))", "return torch.exp2((new.double() - old.double()) * LOG2E).float()")),
    Variation("rounding", "a ratio that is rounded to bfloat16", _loss("return primitive(points.primitive(\"exp2\"))(mul(sub(new, old), LOG2E))", "from rlkernel.reference.arith import cast_bf16; return cast_bf16(primitive(points.primitive(\"exp2\"))(mul(sub(new, old), LOG2E)))")),
    Variation("dependency", "tokens that are not trained", _loss("trained = inputs.trained", "trained = torch.ones_like(inputs.trained)")),
    Variation("primitives", "a clipping bound that includes equality", _loss("(a > 0) & (ratio > constants.high)", "(a > 0) & (ratio >= constants.high)")),
)  # fmt: skip
