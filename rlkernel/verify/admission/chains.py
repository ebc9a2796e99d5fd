"""Other chains than the contract's: orders, cuts, accumulators, operands. Each takes the chain and gives another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlkernel.reference.arith import cast_bf16

Tensor = torch.Tensor
ChainFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(a [..., K], b [..., K], start [...]) -> [...], float32."""
LEAST_NORMAL = 2.0**-126


def flushed(x: Tensor) -> Tensor:
    """Subnormals as zeros of their sign."""
    return torch.where(x.abs() < LEAST_NORMAL, torch.zeros_like(x).copysign(x), x) if x.is_floating_point() else x


def descending(chain: ChainFunction) -> ChainFunction:
    """The chain from the last element to the first."""
    return lambda a, b, start: chain(a.flip(-1), b.flip(-1), start)


def cut(size: int) -> Callable[[ChainFunction], ChainFunction]:
    """Pieces of the axis, each its own chain from +0, added ascending."""

    def make(chain: ChainFunction) -> ChainFunction:
        def pieces(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
            total = start
            for first in range(0, a.shape[-1], size):
                zero = torch.zeros_like(total)
                part = chain(a[..., first : first + size], b[..., first : first + size], zero)
                total = part if first == 0 and not bool((start != 0).any()) else total + part
            return total

        return pieces

    return make


def strided(lanes: int) -> Callable[[ChainFunction], ChainFunction]:
    """Side-by-side chains over every ``lanes``-th element, merged pairwise."""

    def make(chain: ChainFunction) -> ChainFunction:
        def sums(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
            parts = [chain(a[..., i::lanes], b[..., i::lanes], torch.zeros_like(start)) for i in range(lanes)]
            while len(parts) > 1:
                parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
            return parts[0] if not bool((start != 0).any()) else start + parts[0]

        return sums

    return make


def from_zero(chain: ChainFunction) -> ChainFunction:
    """A chain of its own, added to what it should have continued."""
    return lambda a, b, start: start + chain(a, b, torch.zeros_like(start))


def unfused(chain: ChainFunction) -> ChainFunction:
    """Product and sum rounded apart."""

    def steps(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        total = start
        for k in range(a.shape[-1]):
            total = total + a[..., k].float() * b[..., k].float()
        return total

    return steps


def fma_through_float64(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A product (exact) and a sum in float64, rounded to float32 afterwards: the sum is rounded twice."""
    return (a.double() * b.double() + c.double()).to(torch.float32)


def through_float64(chain: ChainFunction) -> ChainFunction:
    """Every step of the chain rounded to float64, then to float32."""

    def steps(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        total = start
        for k in range(a.shape[-1]):
            total = fma_through_float64(a[..., k], b[..., k], total)
        return total

    return steps


def in_float64(chain: ChainFunction) -> ChainFunction:
    """Accumulated in float64, rounded at the end."""

    def steps(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        total = start.double()
        for k in range(a.shape[-1]):
            total = total + a[..., k].double() * b[..., k].double()
        return total.to(torch.float32)

    return steps


def in_bf16(chain: ChainFunction) -> ChainFunction:
    """The accumulator rounded to bfloat16 at every step."""

    def steps(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        total = start
        for k in range(a.shape[-1]):
            total = cast_bf16(chain(a[..., k : k + 1], b[..., k : k + 1], total))
        return total

    return steps


def narrow_inputs(chain: ChainFunction) -> ChainFunction:
    """Operands rounded to bfloat16 first."""
    return lambda a, b, start: chain(cast_bf16(a), cast_bf16(b), start)


def kept_bits(values: Tensor, bits: int, mode: str) -> Tensor:
    """float32 values with so many bits of significand: ``nearest`` even, ``away`` (ties) or ``cut``."""
    drop = 24 - bits
    whole = values.float().contiguous().view(torch.int32)
    if mode == "nearest":
        whole = whole + ((1 << (drop - 1)) - 1) + ((whole >> drop) & 1)
    elif mode == "away":
        whole = whole + (1 << (drop - 1))
    return torch.where(values.isnan(), values.float(), (whole & -(1 << drop)).view(torch.float32))


def tf32_inputs(mode: str) -> Callable[[ChainFunction], ChainFunction]:
    """Operands with the 11 bits of tf32."""
    return lambda chain: lambda a, b, start: chain(kept_bits(a, 11, mode), kept_bits(b, 11, mode), start)


def float16_inputs(chain: ChainFunction) -> ChainFunction:
    """Operands rounded to float16."""
    return lambda a, b, start: chain(a.to(torch.float16).float(), b.to(torch.float16).float(), start)


def flushing(chain: ChainFunction) -> ChainFunction:
    """Subnormal operands and sums as zeros of their sign, at every step."""

    def steps(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        total = start
        for k in range(a.shape[-1]):
            total = flushed(chain(flushed(a[..., k : k + 1]), flushed(b[..., k : k + 1]), total))
        return total

    return steps


def rounded_state(size: int) -> Callable[[ChainFunction], ChainFunction]:
    """The accumulator rounded to bfloat16 after every ``size`` elements."""

    def make(chain: ChainFunction) -> ChainFunction:
        def steps(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
            total = start
            for first in range(0, a.shape[-1], size):
                total = cast_bf16(chain(a[..., first : first + size], b[..., first : first + size], total))
            return total

        return steps

    return make
