"""At least a billion outputs of every kernel against the interpreter, or against the kernel that was compared with it.

    python -m benchmarks.gpu.bulk_bits --out results.json [--only chains adamw ...]

Row kernels are held to the interpreter of the contract directly; the warp-specialised attention to the plain kernels
(:mod:`benchmarks.gpu.attention_bits` compares those with the interpreter), decode and chunks to the training forward at
every position of every sequence; the head's gradients with one source of matrix products to those with another. What a
kernel can be tuned by is swept. Exit code 1 if anything differs or failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.attention_bits import BACKWARD_TILES, FORWARD_TILES, KINDS, draw, entries, paged, starts_of
from benchmarks.gpu.cases import Case, main, once
from benchmarks.gpu.head_bits import outputs, vendor
from benchmarks.gpu.reference_calls import EPS
from benchmarks.gpu.rows_bits import DTYPES, FEW, _plain, _reference, _vector
from benchmarks.hopper_bits import hazard
from rlkernel.kernels.cpu.optimizer import AdamWScalars
from rlkernel.kernels.triton import launch, launch_attention, launch_decode, launch_heads, launch_optimizer, launch_rows
from rlkernel.kernels.triton.attention_points import attention_points, backward_points
from rlkernel.kernels.triton.launch_attention import AttentionTile
from rlkernel.kernels.triton.launch_chains import ChainTuning, column_chain
from rlkernel.kernels.triton.launch_logprob import HeadTile, linear_logprob
from rlkernel.kernels.triton.launch_logprob_backward import linear_logprob_backward
from rlkernel.kernels.triton.launch_rows import RowTuning
from rlkernel.reference import optimizer as reference_optimizer
from rlkernel.reference.arith import mul
from rlkernel.reference.reductions import add_chain

DEVICE = "cuda"
Tensor = torch.Tensor

ROW_TUNINGS = (
    *(RowTuning(rows, warps) for rows, warps in product((1, 2, 4, 8), (1, 2, 4, 8, 16))),
    *(RowTuning(rows, warps, holds=True) for rows, warps in product((1, 2), (2, 4, 8))),
    *(RowTuning(1, 4, *chain) for chain in ((16, 8, 1), (64, 16, 2), (128, 32, 2), (32, 64, 3))),
)
CHAIN_TUNINGS = tuple(
    ChainTuning(*tuning)
    for tuning in product((32, 64, 128), (8, 16, 32), (2, 3, 4, 8))
    if tuning[0] * tuning[1] * tuning[2] <= 16384  # two operands of float32 have to fit into 128 KiB of shared memory
)


def norms_bfloat16() -> Iterator[Case]:
    yield from norms(torch.bfloat16)


def norms_float32() -> Iterator[Case]:
    yield from norms(torch.float32)


def norms(dtype: torch.dtype) -> Iterator[Case]:
    """RMSNorm with and without the sum before it, and its gradient: 2,560 rows of 4,096, at least 20 tunings."""
    for name in FEW:
        reference = _reference(dtype)
        x, branch, dy = (hazard(name, 2560, 4096, seed, dtype).contiguous() for seed in (31, 32, 33))
        w, start = _vector("normal", 4096, 34, dtype), _vector("normal", 4096, 35, torch.float32)
        (stream,) = (v.to(dtype) for v in reference.forward("residual_add", [x, branch]))
        (y,) = reference.forward("rms_norm", [stream], {"w": w})
        (dx,), running = reference.backward("rms_norm", [stream], [dy], {"w": w}, {"w": start})
        _, _, r = launch_rows.add_rms_norm(x, branch, w, EPS)

        def gradient(
            tuning: RowTuning, dy: Tensor = dy, stream: Tensor = stream, w: Tensor = w, r: Tensor = r,
            start: Tensor = start,
        ) -> list[Tensor]:  # fmt: skip
            dw = start.clone()
            return [launch_rows.rms_norm_backward(dy, stream, w, r, dw, tuning=tuning), dw]

        for t in ROW_TUNINGS:
            yield Case(
                f"add_rms_norm {dtype} | {t}", name,
                lambda t=t, x=x, branch=branch, w=w: launch_rows.add_rms_norm(x, branch, w, EPS, tuning=t)[:2],
                lambda stream=stream, y=y: [stream, y],
            )  # fmt: skip
            if not t.holds:
                yield Case(
                    f"rms_norm {dtype} | rows {t.rows}, warps {t.num_warps}", name,
                    lambda t=t, x=stream, w=w: launch.rms_norm(x, w, EPS, rows=t.rows, num_warps=t.num_warps)[0],
                    lambda y=y: y,
                )  # fmt: skip
                yield Case(
                    f"rms_norm_backward {dtype} | {t}", name, partial(gradient, t),
                    lambda dx=dx, dw=running["w"]: [dx, dw],
                )  # fmt: skip
        yield Case(f"rms_norm {dtype} | as dispatched", name, lambda x=stream, w=w: launch.rms_norm(x, w, EPS)[0],
                   lambda y=y: y)  # fmt: skip


def chains() -> Iterator[Case]:
    """Chains over rows, of sums and of products: 16 rows of 8,388,608 columns."""
    rows, columns = 16, 1 << 23
    for dtype, name in product(DTYPES, FEW):
        dy, x = (hazard(name, rows, columns, seed, dtype).contiguous() for seed in (41, 42))
        start = _vector("normal", columns, 43, torch.float32)
        r = torch.rand(rows, generator=torch.Generator(DEVICE).manual_seed(44), device=DEVICE) + 0.1
        reference = _reference(dtype)
        norm: Any = reference._ops["rms_norm"]
        wgrad = reference.contract.entries[("trainer_backward", "rms_norm.wgrad")]
        xh = mul(x.float(), r[:, None].expand(x.shape))
        fused = norm._continued(wgrad, dy.float(), xh, start)
        added = add_chain(dy.float(), start)
        del xh

        def run(
            tuning: ChainTuning, products: bool, dy: Tensor = dy, x: Tensor = x, start: Tensor = start, r: Tensor = r
        ) -> Tensor:
            total = start.clone()
            column_chain(dy, total, tuning=tuning, **({"x": x, "inv_rms": r} if products else {}))
            return total

        for t in CHAIN_TUNINGS:
            yield Case(f"column_chain of products {dtype} | {t}", name, partial(run, t, True), lambda e=fused: e)
            yield Case(f"column_chain of sums {dtype} | {t}", name, partial(run, t, False), lambda e=added: e)


def elementwise() -> Iterator[Case]:
    """Residual sums, SwiGLU with its gradient: nothing to tune."""
    for dtype, name in product(DTYPES, FEW):
        a, b = (hazard(name, 51_200, 4096, seed, dtype).contiguous() for seed in (51, 52))
        reference = _reference(dtype)
        yield Case(
            f"residual_add {dtype} | plain", name, lambda a=a, b=b: launch_rows.residual_add(a, b),
            lambda reference=reference, a=a, b=b: reference.forward("residual_add", [a, b]),
        )  # fmt: skip
        gate, up, dy = (hazard(name, 49_152, 4224, seed, dtype).contiguous() for seed in (53, 54, 55))
        fused = torch.cat([gate, up], 1).contiguous()

        def activated(reference: Any = reference, gate: Tensor = gate, up: Tensor = up) -> list[Tensor]:
            found: list[Tensor] = reference.forward("swiglu", [gate, up])
            return found

        def gradient(reference: Any = reference, gate: Tensor = gate, up: Tensor = up, dy: Tensor = dy) -> Tensor:
            (dgate, dup), _ = reference.backward("swiglu", [gate, up], [dy])
            return torch.cat([dgate, dup], 1)

        yield Case(f"swiglu {dtype} | plain", name, lambda x=fused: launch_rows.swiglu(x, leaves=1), activated)
        yield Case(
            f"swiglu_backward {dtype} | plain", name,
            lambda dy=dy, x=fused: launch_rows.swiglu_backward(dy, x, leaves=1), gradient,
        )  # fmt: skip


def adamw() -> Iterator[Case]:
    """AdamW on 51,200,000 weights: master, both moments, and the weight of the model."""
    step = _reference(torch.bfloat16).contract.entries[("optimizer_step", "adamw")]
    for name in FEW:
        count = 51_200_000
        grad, *states = (
            _vector(n, count, seed, torch.float32) for n, seed in ((name, 61), *[("normal", s) for s in (62, 63, 64)])
        )
        states[2] = states[2].abs()
        f = np.float32
        rates = AdamWScalars(f(1e-3), f(0.9), f(0.95), f(0.1), f(0.05), f(3.1), f(2.2), f(1e-8), f(0.1), clip=f(0.37))

        def stepped(states: list[Tensor] = states, grad: Tensor = grad, rates: AdamWScalars = rates) -> list[Tensor]:
            return list(reference_optimizer.adamw(step, *states, grad, rates))

        def kernel(states: list[Tensor] = states, grad: Tensor = grad, rates: AdamWScalars = rates) -> list[Tensor]:
            master, m, v = (x.clone() for x in states)
            weight = torch.empty_like(master, dtype=torch.bfloat16)
            scalars = launch_optimizer.scalars_on_device(rates, grad.device)
            clip = torch.full((1,), float(rates.clip), device=DEVICE)
            launch_optimizer.adamw(master, m, v, grad, weight, scalars, clip)
            return [master, m, v, weight]

        yield Case("adamw float32 | plain", name, kernel, stepped)


def embeddings() -> Iterator[Case]:
    """Look-ups of 210,000 rows of 1,024, and sums of 3,000 gradients into a table of 50,000 rows."""
    for dtype, name, turn in product(DTYPES, FEW, range(4)):
        generator = torch.Generator(DEVICE).manual_seed(71 + turn)
        table = hazard(name, 50_000, 1024, 72 + turn, dtype).contiguous()
        reference = _reference(dtype)
        if turn == 0:
            ids = torch.randint(0, 50_000, (210_000,), generator=generator, device=DEVICE)
            yield Case(
                f"embedding {dtype} | plain", name, lambda t=table, i=ids: launch_rows.embedding(t, i),
                lambda r=reference, t=table, i=ids: r.forward("embedding", [i], {"w": t}),
            )  # fmt: skip
        few = torch.randint(0, 50_000, (1000,), generator=generator, device=DEVICE)
        ids = few[torch.randint(0, 1000, (3000,), generator=generator, device=DEVICE)]
        dh, start = (
            hazard(name, 3000, 1024, 73 + turn, dtype).contiguous(),
            hazard("normal", 50_000, 1024, 74, torch.float32),
        )

        def gradient(dh: Tensor = dh, ids: Tensor = ids, start: Tensor = start) -> Tensor:
            grad = start.clone()
            launch_rows.embedding_gradient(dh, ids, grad)
            return grad

        def expected(
            r: Any = reference, t: Tensor = table, i: Tensor = ids, dh: Tensor = dh, s: Tensor = start
        ) -> Tensor:
            found: Tensor = r.backward("embedding", [i], [dh], {"w": t}, {"w": s})[1]["w"]
            return found

        yield Case(f"embedding_gradient {dtype} | plain", name, gradient, expected)


def rotations() -> Iterator[Case]:
    """RoPE and its gradient, and RMSNorm with RoPE: 12 query heads of 98,304 tokens."""
    tokens, groups, per = 98_304, 4, 3
    for dtype, depth, name in product(DTYPES, (128, 64), FEW):
        reference = _reference(dtype)
        generator = torch.Generator(DEVICE).manual_seed(81)
        angle = torch.rand((300, depth // 2), generator=generator, device=DEVICE) * 6
        positions = torch.randint(0, 300, (tokens,), generator=generator, device=DEVICE, dtype=torch.int32)
        rotation = launch_heads.Rotation(positions, torch.cos(angle), torch.sin(angle))
        host = {
            "rope": SimpleNamespace(cos=rotation.cos.cpu().numpy(), sin=rotation.sin.cpu().numpy()),
            "batch": SimpleNamespace(positions=positions.cpu().numpy()),
        }
        fused = hazard(name, tokens, groups * (per + 2) * depth, 82, dtype).contiguous()
        w = _vector("normal", depth, 83, dtype)
        place = launch_heads.fused_places(groups * per, groups, depth)[0]
        plain = _plain(fused, place)
        dy = hazard(name, tokens, place.heads * depth, 84, dtype).view(plain.shape).contiguous()

        def backward(dy: Tensor = dy, fused: Tensor = fused, place: Any = place, rotation: Any = rotation) -> Tensor:
            gradient = torch.zeros_like(fused)
            launch_heads.rope_backward(dy.clone(), place, rotation, gradient)
            return _plain(gradient, place)

        def both(
            reference: Any = reference, plain: Tensor = plain, w: Tensor = w, dtype: torch.dtype = dtype,
            host: dict[str, Any] = host,
        ) -> list[Tensor]:  # fmt: skip
            (normed,) = reference.forward("qk_norm", [plain], {"w": w})
            found: list[Tensor] = reference.forward("rope", [normed.to(dtype)], **host)
            return found

        yield Case(
            f"rope {dtype} | depth {depth}", name,
            lambda x=fused, p=place, r=rotation: launch_heads.rope(x, p, r)[0],
            lambda r=reference, x=plain, h=host: r.forward("rope", [x], **h),
        )  # fmt: skip
        yield Case(
            f"rope_backward {dtype} | depth {depth}", name, backward,
            lambda r=reference, x=plain, dy=dy, h=host: r.backward("rope", [x], [dy], **h)[0],
        )  # fmt: skip
        yield Case(
            f"rms_norm and rope {dtype} | depth {depth}", name,
            lambda x=fused, p=place, r=rotation, w=w: launch_heads.rope(x, p, r, w=w, eps=EPS)[0], both,
        )  # fmt: skip


HEADS = (32, 8)
CLASSES = (*KINDS, "nan in values")


def attention() -> Iterator[Case]:
    """The warp-specialised forward against the plain kernel: 20 draws of 12,288 rows, 32 heads of 128."""
    from rlkernel.kernels.triton.launch_attention_hopper import varlen_hopper

    points = attention_points(entries("hopper", "bfloat16", 128)[0])
    batches = ((4095, 4096, 4097), (1, 511, 7000, 129, 4647), (2048,) * 6, (12288,))
    for turn in range(20):
        lengths, kind = batches[turn % 4], CLASSES[turn % len(CLASSES)]
        q, k, v = draw(kind, sum(lengths), HEADS, 128, torch.bfloat16, 90 + turn)
        starts, longest = starts_of(lengths), max(lengths)

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, starts: Tensor = starts, longest: int = longest) -> Any:
            out, lse2 = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=DEVICE)
            varlen_hopper(q, k, v, starts, longest, points, out, lse2, False)
            return [out, lse2]

        yield Case(
            "attention forward | warp-specialised", f"{kind}, sequences of {lengths}", run,
            lambda a=(q, k, v, starts, longest): launch_attention.attention_varlen(*a, points, tile=FORWARD_TILES[0]),
        )  # fmt: skip


FINITE = tuple(kind for kind in KINDS if kind != "nan and inf")


def attention_gradients() -> Iterator[Case]:
    """The warp-specialised backward against the plain one: 14 draws of finite values (docs/gpu-attention.md)."""
    from rlkernel.kernels.triton.launch_attention_hopper import backward_hopper

    forward, backward = entries("hopper", "bfloat16", 128)
    points, gradient_points = attention_points(forward), backward_points(backward)
    for turn in range(14):
        lengths, kind = ((4095, 4096, 4097), (1, 511, 7000, 129, 4647))[turn % 2], FINITE[turn % len(FINITE)]
        q, k, v = draw(kind, sum(lengths), HEADS, 128, torch.bfloat16, 120 + turn)
        dout = draw("normal", sum(lengths), HEADS, 128, torch.bfloat16, 140 + turn)[0]
        starts, longest = starts_of(lengths), max(lengths)
        found = launch_attention.attention_varlen(q, k, v, starts, longest, points, tile=FORWARD_TILES[0])
        arguments = (dout, q, k, v, *found, starts, longest, gradient_points)

        def run(arguments: Any = arguments) -> list[Tensor]:
            gradients = [torch.empty_like(x) for x in arguments[1:4]]
            backward_hopper(*arguments, *gradients)
            return gradients

        yield Case(
            "attention backward | warp-specialised", f"{kind}, sequences of {lengths}", run,
            lambda a=arguments: launch_attention.attention_backward(
                *a, dq_tile=BACKWARD_TILES[0], dkv_tile=AttentionTile(32, 64, 4, 2)
            ),
        )  # fmt: skip


def attention_cases() -> Iterator[Case]:
    """Decode and chunks at every position of 256 sequences of 1,024 keys and more against their training forward."""
    points = attention_points(entries("hopper", "bfloat16", 128)[0])
    for sequences, length, kind in ((256, 1024, "normal"), (16, 4200, "cancellation")):
        lengths, page = (length,) * sequences, 16
        q, k, v = draw(kind, sum(lengths), HEADS, 128, torch.bfloat16, 160)
        starts = starts_of(lengths)
        out, _ = launch_attention.attention_varlen(q, k, v, starts, length, points)
        k_cache, v_cache, table = paged(k, v, lengths, page, 2)
        splits = -(-length // points.split)
        by_sequence, rows_out = q.view(sequences, length, *HEADS[:1], 128), out.view(sequences, length, *HEADS[:1], 128)

        def decode(
            first: int, last: int, q: Any = by_sequence, caches: Any = (k_cache, v_cache, table), n: int = splits
        ) -> Tensor:
            found = [
                launch_decode.decode_attention(
                    q[:, p].contiguous(), *caches, torch.full((len(q),), p, dtype=torch.int32, device=DEVICE), n, points
                )
                for p in range(first, last)
            ]
            return torch.stack(found, 1)

        def chunk(
            first: int, last: int, q: Any = by_sequence, caches: Any = (k_cache, v_cache, table), n: int = length
        ) -> Tensor:
            positions = torch.arange(first, last, dtype=torch.int32, device=DEVICE).repeat(len(q))
            counts = (last - first,) * len(q)
            found = launch_attention.attention_paged(
                q[:, first:last].reshape(-1, *q.shape[2:]).contiguous(), *caches, starts_of(counts), positions,
                last - first, n, points,
            )[0]  # fmt: skip
            return found.view(len(q), last - first, *q.shape[2:])

        what = f"{kind}, {sequences} sequences of {length}"
        for first in range(0, length, 128):
            last = min(first + 128, length)
            want = lambda a=first, b=last, o=rows_out: o[:, a:b].contiguous()  # noqa: E731
            yield Case("attention decode | warp-specialised", f"{what}, positions {first} to {last - 1}",
                       partial(decode, first, last), want)  # fmt: skip
            yield Case("attention in chunks | paged", f"{what}, positions {first} to {last - 1}",
                       partial(chunk, first, last), want)  # fmt: skip


def heads() -> Iterator[Case]:
    """Statistics of 4,096 rows over 151,936 logits, and both gradients, by three sources of matrix products."""
    vendor()
    for turn, name in enumerate(("normal", "cancellation")):
        generator = torch.Generator(DEVICE).manual_seed(180 + turn)
        x = hazard(name, 4096, 2048, 181 + turn, torch.bfloat16)
        w = (hazard(name, 151_936, 2048, 182 + turn, torch.bfloat16) * 0.03).contiguous()
        targets = torch.randint(0, len(w), (len(x),), generator=generator, device=DEVICE)
        coefficient = torch.randn(len(x), generator=generator, device=DEVICE)
        given = (x.contiguous(), w, targets, 0.7, 2, "matrix")
        statistics = once(lambda g=given: linear_logprob(*g, gemm="triton", tile=HeadTile()))

        def gradients(gemm: Any, g: Any = given, c: Tensor = coefficient, s: Any = statistics) -> list[Tensor]:
            grad = torch.empty((len(g[1]), g[0].shape[1]), dtype=torch.float32, device=DEVICE)
            dx = linear_logprob_backward(*g[:2], s(), g[2], c, *g[3:5], grad, g[5], gemm=gemm, fresh=True)
            return [dx, grad]

        base = once(partial(gradients, "vendor"))
        for gemm in ("hopper", "vendor"):
            yield Case(f"linear_logprob | {gemm}", f"{name}, 622,329,856 logits",
                       lambda m=gemm, g=given: outputs(linear_logprob(*g, gemm=m)),
                       lambda s=statistics: outputs(s()))  # fmt: skip
        for gemm in ("hopper", "triton"):
            yield Case(f"linear_logprob_backward | {gemm}", f"{name}, against the vendor's products",
                       partial(gradients, gemm), base)  # fmt: skip


SECTIONS = (
    norms_bfloat16,
    norms_float32,
    chains,
    elementwise,
    adamw,
    embeddings,
    rotations,
    attention,
    attention_gradients,
    attention_cases,
    heads,
)


if __name__ == "__main__":
    sys.exit(main("a billion outputs a kernel", "benchmarks.gpu.bulk_bits", SECTIONS))
