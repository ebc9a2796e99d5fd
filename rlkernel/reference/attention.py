"""Attention as its contract entries say, forward and backward, on torch tensors of any device. Slow and plain.

What may vary is read from the entry: key block, split size, lanes of the row sum, multiply-accumulate primitive and its
step, exponential of the weights, rounding sites, and which keys a query may depend on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlkernel.contract.entries import KEYS, QUERIES
from rlkernel.contract.points import SixPoints
from rlkernel.errors import ContractError
from rlkernel.reference.arith import add, cast, div, fma32, maximum, mul, sub
from rlkernel.reference.lookup import primitive
from rlkernel.reference.reductions import add_chain, chain, multiply_accumulate, tree

Tensor = torch.Tensor
NEGATIVE_INFINITY = float("-inf")


def visible(points: SixPoints, positions: Tensor, keys: int) -> Tensor:
    """bool [n, keys]: which keys the query rows at ``positions`` may depend on. Raises ContractError otherwise."""
    if not points.dependency.domain.endswith(KEYS) and KEYS not in points.dependency.domain:
        raise ContractError(f"attention over {points.dependency.domain!r} is not defined; {KEYS!r} is")
    return torch.arange(keys, device=positions.device)[None, :] <= positions[:, None]


def bits_constant(points: SixPoints, name: str) -> float:
    """A float32 constant of an entry."""
    pattern = points.constant(name).removeprefix("f32:")
    return float(torch.tensor([int(pattern, 16)], dtype=torch.int64).to(torch.int32).view(torch.float32)[0])


def scores(points: SixPoints, q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores [n, L] of query rows [n, D] and keys [L, D]."""
    return mul(
        chain(points, q[:, None, :], k[None, :, :]), torch.full((), bits_constant(points, "scale2"), device=q.device)
    )


def visible_chain(points: SixPoints, a: Tensor, b: Tensor, *, valid: Tensor, start: Tensor | None = None) -> Tensor:
    """Chain over k of a [R, K] and b [C, K] in which row r takes only the k of ``valid`` [R, K] -> [R, C].

    A matrix unit takes the others as zeros, which leaves its accumulator as it is; an fma chain leaves them out, which
    also keeps the sign of a zero.
    """
    total = torch.zeros(len(a), len(b), device=a.device) if start is None else start
    zero = torch.zeros_like(a)
    if multiply_accumulate(points).step > 1:
        clean = torch.where(valid.any(0)[None, :], b, torch.zeros_like(b))
        return chain(points, torch.where(valid, a, zero)[:, None, :], clean[None, :, :], total)
    for k in range(a.shape[1]):
        taken = chain(points, a[:, None, k : k + 1], b[None, :, k : k + 1], total)
        total = torch.where(valid[:, k, None], taken, total)
    return total


@dataclass
class _Split:
    """Running maximum [n], sum [n] and accumulator [n, D] of one split; ``seen``: rows with a visible key."""

    m: Tensor
    l: Tensor  # noqa: E741 (the usual name of the row sum)
    acc: Tensor
    seen: Tensor


def attend(points: SixPoints, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One head of one sequence: q [n, D] at ``positions`` [n], k and v [L, D] -> (out [n, D], lse2 [n])."""
    block, split = int(points.constant("key_block")), points.split.leaf_size
    s, mask = scores(points, q, k), visible(points, positions, len(k))
    parts = []
    for first in range(0, len(k), split):
        part = _Split(
            torch.full((len(q),), NEGATIVE_INFINITY, device=q.device),
            torch.zeros(len(q), device=q.device),
            torch.zeros(len(q), v.shape[1], device=q.device),
            mask[:, first : first + split].any(1),
        )
        for start in range(first, min(first + split, len(k)), block):
            end = min(start + block, first + split, len(k))
            _block(points, part, s[:, start:end], mask[:, start:end], v[start:end])
        parts.append(part)
    return _merge(points, parts)


def _block(points: SixPoints, part: _Split, s: Tensor, mask: Tensor, v: Tensor) -> None:
    exp2, weights_exp2 = primitive(points.primitive("exp2")), primitive(points.primitive("weights_exp2"))
    active = mask.any(1)
    hidden = torch.where(mask, s, torch.full_like(s, NEGATIVE_INFINITY))
    new = part.m
    for j in range(s.shape[1]):
        new = torch.where(mask[:, j], maximum(new, hidden[:, j]), new)
    alpha = exp2(sub(part.m, new))
    alpha = torch.where(part.m == NEGATIVE_INFINITY, torch.zeros_like(alpha), alpha)
    alpha = torch.where((part.m == NEGATIVE_INFINITY) & new.isnan(), new, alpha)
    p = weights_exp2(torch.where(mask, sub(s, new[:, None]), torch.zeros_like(s)))
    if (narrow := points.rounds("weights")) is not None:
        p = cast(p, narrow)
    p = torch.where(mask, p, torch.zeros_like(p))
    if points.split.lanes == 1:
        total = mul(part.l, alpha)
        for j in range(p.shape[1]):
            total = torch.where(mask[:, j], add(total, p[:, j]), total)
    else:
        total = fma32(part.l, alpha, _lane_total(points, p))
    acc = visible_chain(points, p, v.T.contiguous(), start=mul(part.acc, alpha[:, None]), valid=mask)
    part.m = torch.where(active, new, part.m)
    part.l = torch.where(active, total, part.l)
    part.acc = torch.where(active[:, None], acc, part.acc)


def _lane_total(points: SixPoints, p: Tensor) -> Tensor:
    lanes = points.split.lanes
    padding = -p.shape[1] % lanes
    padded = torch.nn.functional.pad(p, (0, padding)).reshape(len(p), -1, lanes)
    return tree(add_chain(padded.transpose(0, 1)), 1)


def _merge(points: SixPoints, parts: list[_Split]) -> tuple[Tensor, Tensor]:
    exp2, log2 = primitive(points.primitive("exp2")), primitive(points.primitive("log2"))
    largest = torch.full_like(parts[0].m, NEGATIVE_INFINITY)
    for part in parts:
        largest = torch.where(part.seen, maximum(largest, part.m), largest)
    total, out = torch.zeros_like(parts[0].l), torch.zeros_like(parts[0].acc)
    for part in parts:
        w = exp2(sub(part.m, largest))
        total = torch.where(part.seen, fma32(part.l, w, total), total)
        out = torch.where(part.seen[:, None], fma32(part.acc, w[:, None].expand_as(out), out), out)
    result = div(out, total[:, None].expand_as(out))
    if (narrow := points.rounds("output")) is not None:
        result = cast(result, narrow)
    return result, add(largest, log2(total))


def attend_backward(
    points: SixPoints, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One KV group of one whole sequence: dout, q, out [n, G, D], k, v [n, D], lse2 [n, G] -> (dq [n, G, D],
    dk, dv).
    """
    if KEYS not in points.dependency.domain or QUERIES not in points.dependency.domain:
        raise ContractError(f"the attention gradient over {points.dependency.domain!r} is not defined")
    n, group = q.shape[0], q.shape[1]
    scale = torch.full((), bits_constant(points, "scale"), device=q.device)
    mask = visible(points, torch.arange(n, device=q.device), n)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    narrow = points.rounds("output")
    for h in range(group):
        p, ds = _weights_and_gradients(points, dout[:, h], q[:, h], k, v, out[:, h], lse2[:, h], mask)
        dq[:, h] = _rounded(mul(visible_chain(points, ds, k.T.contiguous(), valid=mask), scale), narrow)
        below = mask.T.contiguous()
        dk = visible_chain(points, ds.T.contiguous(), q[:, h].T.contiguous(), start=dk, valid=below)
        dv = visible_chain(points, p.T.contiguous(), dout[:, h].T.contiguous(), start=dv, valid=below)
    return dq, _rounded(mul(dk, scale), narrow), _rounded(dv, narrow)


def query_gradients(
    points: SixPoints, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse2: Tensor, positions: Tensor
) -> Tensor:
    """dq of some rows of a sequence, of one head: dout, q, out [r, D] at ``positions`` [r], lse2 [r], k and v [L, D]
    up to the last of the rows at least -> [r, D]. The bits that :func:`attend_backward` gives them.
    """
    mask = visible(points, positions, len(k))
    _, ds = _weights_and_gradients(points, dout, q, k, v, out, lse2, mask)
    scale = torch.full((), bits_constant(points, "scale"), device=q.device)
    return _rounded(mul(visible_chain(points, ds, k.T.contiguous(), valid=mask), scale), points.rounds("output"))


def _rounded(value: Tensor, to: str | None) -> Tensor:
    return value if to is None else cast(value, to)


def _weights_and_gradients(
    points: SixPoints, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse2: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights and gradients of the scores [r, L] of one head's rows, rounded; +0 where ``mask`` [r, L] hides a key."""
    s = scores(points, q, k)
    delta = _row_dot(points, dout, out)
    p = primitive(points.primitive("weights_exp2"))(torch.where(mask, sub(s, lse2[:, None]), torch.zeros_like(s)))
    dp = chain(points, dout[:, None, :], v[None, :, :])
    ds = _rounded(mul(p, sub(dp, delta[:, None].expand_as(dp))), points.rounds("score gradients"))
    hidden = torch.zeros_like(s)
    return torch.where(mask, _rounded(p, points.rounds("weights")), hidden), torch.where(mask, ds, hidden)


def _row_dot(points: SixPoints, a: Tensor, b: Tensor) -> Tensor:
    """Chain over the last axis of two arrays [n, D], one fma at a time in every profile -> [n]."""
    fused = primitive(points.primitive("fma"))
    total = torch.zeros(len(a), device=a.device)
    for d in range(a.shape[1]):
        total = fused(a[:, d], b[:, d], total)
    return total
