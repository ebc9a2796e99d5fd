"""Bits of the row kernels on a GPU against the interpreter of the contract: counts, never tolerances.

    python -m benchmarks.gpu.rows_bits --out results.json

Norms, rotations, SwiGLU, embedding, sums and the optimizer, forward and backward, in bfloat16 (``hopper``) and float32
(``portable``), over hazards and launch parameters. Exit code 1 if anything differs or failed.
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

from benchmarks.gpu.cases import Case, main, once
from benchmarks.gpu.reference_calls import EPS, Reference, contract
from benchmarks.hopper_bits import hazard
from rlkernel.kernels.cpu.optimizer import AdamWScalars
from rlkernel.kernels.triton import launch, launch_heads, launch_optimizer, launch_rows
from rlkernel.kernels.triton.launch_chains import ChainTuning, column_chain
from rlkernel.kernels.triton.launch_rows import RowTuning
from rlkernel.reference import optimizer as reference_optimizer
from rlkernel.reference.reductions import add_chain

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float32)
FEW = ("normal", "wide spread", "subnormal inputs", "zeros", "NaN and infinity")
TUNINGS = (RowTuning(), RowTuning(1, 1, 32, 16), RowTuning(4, 4, 64, 8), RowTuning(2, 1, 128, 32, 2))
CHAINS = (ChainTuning(), ChainTuning(32, 16, 3), ChainTuning(64, 32, 4))
Tensor = torch.Tensor


def _reference(dtype: torch.dtype) -> Reference:
    name = str(dtype).removeprefix("torch.")
    return Reference(contract("hopper" if dtype == torch.bfloat16 else "portable", name), DEVICE)


def _vector(name: str, n: int, seed: int, dtype: torch.dtype) -> Tensor:
    return hazard(name, 1, n, seed, dtype)[0].contiguous()


def norms() -> Iterator[Case]:
    for dtype, (rows, n), name in product(DTYPES, ((256, 4096), (257, 1000), (64, 128), (50, 1)), FEW):
        reference = _reference(dtype)
        x, branch, dy = (hazard(name, rows, n, seed, dtype).contiguous() for seed in (1, 2, 3))
        w, start = _vector("normal", n, 4, dtype), _vector("normal", n, 5, torch.float32)

        def expected(
            reference: Reference = reference, x: Tensor = x, branch: Tensor = branch, dy: Tensor = dy,
            w: Tensor = w, start: Tensor = start, dtype: torch.dtype = dtype,
        ) -> list[Tensor]:  # fmt: skip
            (stream,) = reference.forward("residual_add", [x, branch])
            (y,) = reference.forward("rms_norm", [stream.to(dtype)], {"w": w})
            (dx,), running = reference.backward("rms_norm", [stream.to(dtype)], [dy], {"w": w}, {"w": start})
            return [stream, y, y, dx, running["w"]]

        def kernel(
            tuning: RowTuning, x: Tensor = x, branch: Tensor = branch, dy: Tensor = dy, w: Tensor = w,
            start: Tensor = start,
        ) -> list[Tensor]:  # fmt: skip
            stream, y, r = launch_rows.add_rms_norm(x, branch, w, EPS, tuning=tuning)
            alone, _ = launch.rms_norm(stream, w, EPS, rows=tuning.rows, num_warps=tuning.num_warps)
            dw = start.clone()
            given = None if tuning == TUNINGS[0] else tuning
            dx = launch_rows.rms_norm_backward(dy, stream, w, r, dw, tuning=given)
            return [stream, y, alone, dx, dw]

        found = once(expected)
        for tuning in TUNINGS:
            yield Case(f"norm {n} {dtype} {tuning}", f"{rows} rows {name}", partial(kernel, tuning), found)


def chains() -> Iterator[Case]:
    for dtype, (rows, n), name in product(DTYPES, ((500, 136), (33, 1024), (1, 8)), FEW):
        dy, x = (hazard(name, rows, n, seed, dtype).contiguous() for seed in (1, 2))
        w, start = _vector("normal", n, 4, dtype), _vector(name, n, 5, torch.float32)
        reference = _reference(dtype)
        added = once(partial(add_chain, dy, start))
        r = once(partial(_inverse, x, w))
        fused = once(partial(_running, reference, x, dy, w, start))
        for tuning in CHAINS:
            config = f"chain {n} {dtype} {tuning}"

            def kernel(
                norm: bool,
                tuning: ChainTuning = tuning,
                dy: Tensor = dy,
                x: Tensor = x,
                start: Tensor = start,
                r: Any = r,
            ) -> Tensor:
                total = start.clone()
                column_chain(dy, total, x=x if norm else None, inv_rms=r() if norm else None, tuning=tuning)
                return total

            yield Case(f"{config} of products", f"{rows} rows {name}", partial(kernel, True), fused)
            yield Case(f"{config} of sums", f"{rows} rows {name}", partial(kernel, False), added)


def _inverse(x: Tensor, w: Tensor) -> Tensor:
    return launch.rms_norm(x, w, EPS)[1]


def _running(reference: Reference, x: Tensor, dy: Tensor, w: Tensor, start: Tensor) -> Tensor:
    return reference.backward("rms_norm", [x], [dy], {"w": w}, {"w": start})[1]["w"]


def heads() -> Iterator[Case]:
    tokens, groups, per = 24, 4, 3
    for dtype, depth, name in product(DTYPES, (128, 64), FEW):
        reference = _reference(dtype)
        generator = torch.Generator(DEVICE).manual_seed(3)
        angle = torch.rand((300, depth // 2), generator=generator, device=DEVICE) * 6
        positions = torch.randint(0, 300, (tokens,), generator=generator, device=DEVICE, dtype=torch.int32)
        rotation = launch_heads.Rotation(positions, torch.cos(angle), torch.sin(angle))
        host = {
            "rope": SimpleNamespace(cos=rotation.cos.cpu().numpy(), sin=rotation.sin.cpu().numpy()),
            "batch": SimpleNamespace(positions=positions.cpu().numpy()),
        }
        fused = hazard(name, tokens, groups * (per + 2) * depth, 1, dtype).contiguous()
        w, start = _vector("normal", depth, 2, dtype), _vector("normal", depth, 8, torch.float32)
        places = launch_heads.fused_places(groups * per, groups, depth)
        for place, what in zip(places, "qkv", strict=True):
            dy = hazard(name, tokens, place.heads * depth, 7, dtype).view(tokens, place.heads, depth).contiguous()
            plain = _plain(fused, place)
            if what == "v":
                yield Case(f"copy {dtype} {depth}", name, partial(_copied, fused, place), lambda plain=plain: plain)
                continue
            for norm, chain in ((False, False), (True, False), (True, True)):
                yield Case(
                    f"rope {dtype} {depth} {what} norm {norm} plain chain {chain}",
                    name,
                    partial(_rotated, fused, dy, place, rotation, (w, start) if norm else None, chain),
                    once(partial(_rotation, reference, plain, dy, host, (w, start) if norm else None)),
                )


def _plain(grouped: Tensor, place: launch_heads.HeadPlace) -> Tensor:
    by_slot = grouped.view(len(grouped), place.groups, place.slots, place.depth)
    parts = by_slot[:, :, place.first : place.first + place.per]
    return parts.reshape(len(grouped), place.heads, place.depth).contiguous()


def _copied(fused: Tensor, place: launch_heads.HeadPlace) -> Tensor:
    back = torch.zeros_like(fused)
    out = torch.empty((len(fused), place.heads, place.depth), dtype=fused.dtype, device=fused.device)
    launch_heads.copy_heads(out, fused, place, gathers=True)
    launch_heads.copy_heads(out, back, place, gathers=False)
    return _plain(back, place)


def _rotated(
    fused: Tensor, dy: Tensor, place: launch_heads.HeadPlace, rotation: launch_heads.Rotation,
    norm: tuple[Tensor, Tensor] | None, plain: bool,
) -> list[Tensor]:  # fmt: skip
    gradient = torch.zeros_like(fused)
    out, r = launch_heads.rope(fused, place, rotation, w=None if norm is None else norm[0], eps=EPS)
    given = None
    if norm is not None and r is not None:
        given = launch_heads.HeadNorm(fused, norm[0], r, norm[1].clone(), plain)
    launch_heads.rope_backward(dy.clone(), place, rotation, gradient, given)
    return [out, _plain(gradient, place), *(() if given is None else (given.dw,))]


def _rotation(
    reference: Reference, plain: Tensor, dy: Tensor, host: dict[str, Any], norm: tuple[Tensor, Tensor] | None
) -> list[Tensor]:
    normed = plain if norm is None else reference.forward("qk_norm", [plain], {"w": norm[0]})[0]
    (out,) = reference.forward("rope", [normed], **host)
    (between,), _ = reference.backward("rope", [normed], [dy], **host)
    if norm is None:
        return [out, between]
    (dx,), running = reference.backward("qk_norm", [plain], [between], {"w": norm[0]}, {"w": norm[1]})
    return [out, dx, running["w"]]


def activations() -> Iterator[Case]:
    tokens, width = 200, 1536
    for dtype, leaves, name in product(DTYPES, (1, 4), (*FEW, "large")):
        kind = "normal" if name == "large" else name
        gate, up, dy = (hazard(kind, tokens, width, seed, dtype).contiguous() for seed in (1, 2, 3))
        gate = gate * 40 if name == "large" else gate
        reference = _reference(dtype)

        def fuse(a: Tensor, b: Tensor, leaves: int = leaves) -> Tensor:
            parts = [x.reshape(tokens, leaves, width // leaves) for x in (a, b)]
            return torch.stack(parts, dim=2).reshape(tokens, 2 * width).contiguous()

        def expected(
            reference: Reference = reference, gate: Tensor = gate, up: Tensor = up, dy: Tensor = dy, fuse: Any = fuse
        ) -> list[Tensor]:
            (out,) = reference.forward("swiglu", [gate, up])
            (dgate, dup), _ = reference.backward("swiglu", [gate, up], [dy])
            return [out, fuse(dgate, dup)]

        def kernel(fused: Tensor, dy: Tensor = dy, leaves: int = leaves) -> list[Tensor]:
            return [launch_rows.swiglu(fused, leaves=leaves), launch_rows.swiglu_backward(dy, fused, leaves=leaves)]

        yield Case(f"swiglu {dtype} {leaves} leaves", name, partial(kernel, fuse(gate, up)), once(expected))


def embeddings() -> Iterator[Case]:
    for dtype, name in product(DTYPES, FEW):
        generator = torch.Generator(DEVICE).manual_seed(1)
        ids = torch.randint(0, 40, (500,), generator=generator, device=DEVICE)
        table, dh = (hazard(name, rows, 520, seed, dtype).contiguous() for rows, seed in ((50, 2), (500, 3)))
        start = hazard("normal", 50, 520, 4, torch.float32).contiguous()
        reference = _reference(dtype)

        def expected(
            table: Tensor = table,
            dh: Tensor = dh,
            start: Tensor = start,
            ids: Tensor = ids,
            reference: Reference = reference,
        ) -> list[Tensor]:
            (out,) = reference.forward("embedding", [ids], {"w": table})
            _, running = reference.backward("embedding", [ids], [dh], {"w": table}, {"w": start})
            return [out, running["w"]]

        def kernel(table: Tensor = table, dh: Tensor = dh, start: Tensor = start, ids: Tensor = ids) -> list[Tensor]:
            grad = start.clone()
            launch_rows.embedding_gradient(dh, ids, grad)
            return [launch_rows.embedding(table, ids), grad]

        yield Case(f"embedding {dtype}", name, kernel, once(expected))


SHAPES = ((1000, 1000), (3,), (1024,), (0,), (5000, 777), (1025,), (1,))


def optimizer() -> Iterator[Case]:
    entries = contract("hopper", "bfloat16").entries
    norm, step = (entries[("optimizer_step", kind)] for kind in ("gradient_norm", "adamw"))
    f = np.float32
    for name, limit in product((*FEW, "subnormal results"), (1.0, 1e30)):
        gradients = {
            f"tensor{i}": hazard(name, 1, int(np.prod(shape)), i, torch.float32).reshape(shape).contiguous()
            for i, shape in enumerate(SHAPES)
        }

        def norms_expected(gradients: dict[str, Tensor] = gradients, limit: float = limit) -> list[Tensor]:
            found = reference_optimizer.gradient_norm(norm, gradients)
            return [found.reshape(1), reference_optimizer.clip_factor(found, limit).reshape(1)]

        found = once(norms_expected)
        yield Case("gradient norm", f"{name} {limit}", partial(launch_optimizer.gradient_norm, gradients, limit), found)
        grad = gradients["tensor0"]
        states = [hazard("normal", 1000, 1000, seed, torch.float32).contiguous() for seed in (20, 21, 22)]
        states[2] = states[2].abs()
        rates = (f(1e-3), f(0.9), f(0.95), f(0.1), f(0.05), f(3.1), f(2.2), f(1e-8), f(0.1))

        def stepped(
            grad: Tensor = grad, states: list[Tensor] = states, found: Any = found, rates: Any = rates
        ) -> list[Tensor]:
            scalars = AdamWScalars(*rates, clip=f(found()[1].item()))
            return list(reference_optimizer.adamw(step, *states, grad, scalars))

        def kernel(
            grad: Tensor = grad, states: list[Tensor] = states, found: Any = found, rates: Any = rates
        ) -> list[Tensor]:
            master, m, v = (x.clone() for x in states)
            weight = torch.empty_like(master, dtype=torch.bfloat16)
            scalars = launch_optimizer.scalars_on_device(AdamWScalars(*rates, clip=f(1)), grad.device)
            launch_optimizer.adamw(master, m, v, grad, weight, scalars, found()[1])
            return [master, m, v, weight]

        yield Case("adamw", f"{name} {limit}", kernel, once(stepped))


SECTIONS = (norms, chains, heads, activations, embeddings, optimizer)


if __name__ == "__main__":
    sys.exit(main("row kernels against the interpreter of the contract", "benchmarks.gpu.rows_bits", SECTIONS))
