"""Row kernels of a dense model in Triton's interpreter against the contract's interpreter: float32, bits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu.reference_calls import EPS, Reference, contract
from rlkernel.kernels.cpu.optimizer import AdamWScalars
from rlkernel.kernels.triton import activation, embedding, loss, norm, norm_backward, optimizer, residual, rope
from rlkernel.kernels.triton.launch import lanes
from rlkernel.reference import arith
from rlkernel.reference import optimizer as reference_optimizer
from rlkernel.reference.loss import KL_TERMS, POLICIES, LossConstants, LossInputs, token_losses

CONTRACT = contract("portable", "float32")
REFERENCE = Reference(CONTRACT, "cpu")


def _run(kernel: object, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    with np.errstate(all="ignore"):
        kernel[grid](*arguments, **constants)  # type: ignore[index]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    flat[::7] = -0.0
    flat[3::11] *= 1e-38
    return x


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
    nan = torch.isnan(a) & torch.isnan(b)
    return bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("n", [1, 3, 100, 257, 512])
def test_norm(n: int, holds: bool) -> None:
    x, branch, w, dy = _random(5, n), _random(5, n, seed=1), _random(n, seed=2), _random(5, n, seed=3)
    stream, y, r = torch.empty_like(x), torch.empty_like(x), torch.empty(5)
    shape = {"N": n, "ROWS": 2, "LANES": lanes(n)}
    _run(norm.rms_norm, (3,), x, branch, w, stream, y, r, 5, EPS, ADDS=True, HOLDS=holds, **shape)
    (summed,) = REFERENCE.forward("residual_add", [x, branch])
    assert _equal(stream, summed)
    (expected,) = REFERENCE.forward("rms_norm", [summed], {"w": w})
    assert _equal(y, expected)
    dw, dx = _random(n, seed=4), torch.empty_like(x)
    (expected_dx,), running = REFERENCE.backward("rms_norm", [summed], [dy], {"w": w}, {"w": dw})
    _run(norm_backward.rms_norm_dx, (3,), dy, stream, w, r, dx, 5, **shape)
    assert _equal(dx, expected_dx)
    _run(norm_backward.rms_norm_dw, (-(-n // 64),), dy, stream, r, dw, 5, n, COLUMNS=64, BLOCK=2, STAGES=1)
    assert _equal(dw, running["w"])


def _tables(tokens: int, half: int) -> SimpleNamespace:
    angle = torch.rand((9, half), generator=torch.Generator().manual_seed(8)) * 6
    positions = torch.arange(tokens, dtype=torch.int32) * 5 % 9
    rope_tables = SimpleNamespace(cos=torch.cos(angle).numpy(), sin=torch.sin(angle).numpy())
    return SimpleNamespace(
        positions=positions,
        cos=torch.cos(angle),
        sin=torch.sin(angle),
        host={"rope": rope_tables, "batch": SimpleNamespace(positions=positions.numpy())},
    )


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("groups", "per", "depth"), [(2, 3, 8), (1, 1, 64)])
def test_heads(norms: bool, groups: int, per: int, depth: int) -> None:
    tokens, slots, half = 5, per + 2, depth // 2
    fused = _random(tokens, groups, slots, depth)
    w, t = _random(depth, seed=1), _tables(tokens, half)
    for first, count in ((0, per), (per, 1)):
        plain = fused[:, :, first : first + count].reshape(tokens, groups * count, depth).contiguous()
        out, r = torch.empty_like(plain), torch.empty(plain.shape[:2])
        place = (groups, count, slots, first)
        shape = {"HALF": half, "WIDTH": half, "ROWS": 4, "NORMS": norms}
        rows = tokens * groups * count
        grid = (-(-rows // 4),)
        _run(rope.head_rope, grid, fused, w, t.positions, t.cos, t.sin, out, r, rows, EPS, *place, **shape)
        normed = REFERENCE.forward("qk_norm", [plain], {"w": w})[0] if norms else plain
        assert _equal(out, REFERENCE.forward("rope", [normed], **t.host)[0])
        dy, dfused = _random(*plain.shape, seed=2), torch.full_like(fused, torch.nan)
        dnormed = torch.empty_like(dy)
        _run(
            rope.head_rope_backward, grid, dy, fused, w, t.positions, t.cos, t.sin, r, dfused, dnormed, rows, *place,
            **shape,
        )  # fmt: skip
        ((expected,), _) = REFERENCE.backward("rope", [normed], [dy], **t.host)
        found = dfused[:, :, first : first + count].reshape(plain.shape).contiguous()
        if norms:
            assert _equal(dnormed, expected)
            dw = _random(depth, seed=5)
            ((expected,), running) = REFERENCE.backward("qk_norm", [plain], [expected], {"w": w}, {"w": dw})
            _run(
                rope.head_norm_dw, (1,), dnormed, fused, r, dw, tokens, *place, DEPTH=depth, COLUMNS=64, BLOCK=4
            )  # fmt: skip
            assert _equal(dw, running["w"])
        assert _equal(found, expected)
        assert int(torch.isnan(dfused).sum()) == dfused.numel() - found.numel()
        back = torch.empty_like(plain)
        _run(rope.head_copy, grid, back, fused, rows, *place, DEPTH=depth, WIDTH=depth, ROWS=4, GATHERS=True)
        assert _equal(back, plain)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("groups", "per", "depth"), [(2, 3, 8), (1, 1, 64), (2, 2, 16)])
def test_heads_of_a_decode_step(norms: bool, groups: int, per: int, depth: int) -> None:
    tokens, half, page = 5, depth // 2, 4
    fused = _random(tokens, groups, per + 2, depth)
    wq, wk, t = _random(depth, seed=1), _random(depth, seed=2), _tables(tokens, half)
    slots = torch.tensor([9, -1, 0, 7, 4])
    positions = t.positions.clone()
    positions[1] = -1  # a row that takes no part
    q = torch.full((tokens, groups * per, depth), torch.nan)
    caches = [torch.full((3, page, groups, depth), torch.nan) for _ in range(2)]
    _run(
        rope.decode_heads, (tokens, groups), fused, wq, wk, positions, slots, t.cos, t.sin, q, *caches, EPS, groups,
        PER=per, SLOTS=1 << (per + 1).bit_length(), HALF=half, WIDTH=half, NORMS=norms,
    )  # fmt: skip
    taken = [0, 2, 3, 4]
    expected = []
    for first, count, w in ((0, per, wq), (per, 1, wk), (per + 1, 1, None)):
        plain = fused[:, :, first : first + count].reshape(tokens, groups * count, depth).contiguous()
        if w is not None:
            plain = REFERENCE.forward("qk_norm", [plain], {"w": w})[0] if norms else plain
            plain = REFERENCE.forward("rope", [plain], **t.host)[0]
        expected.append(plain)
    assert _equal(q[taken], expected[0][taken])
    for cache, rows in zip(caches, expected[1:], strict=True):
        flat = cache.view(-1, groups, depth)
        assert _equal(flat[slots[taken]], rows[taken])
        assert int(torch.isnan(flat).sum()) == flat.numel() - len(taken) * groups * depth


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_swiglu(leaves: int) -> None:
    tokens, width = 3, 40
    gate, up, dy = _random(tokens, width), _random(tokens, width, seed=1), _random(tokens, width, seed=2)

    def fuse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = [x.reshape(tokens, leaves, width // leaves) for x in (a, b)]
        return torch.stack(parts, dim=2).reshape(tokens, 2 * width).contiguous()

    fused = fuse(gate, up)
    out, dfused = torch.empty_like(gate), torch.empty_like(fused)
    grid = (tokens, -(-width // leaves // 16) + 1, leaves)
    _run(activation.swiglu, grid, fused, out, width, width // leaves, BLOCK=16)
    assert _equal(out, REFERENCE.forward("swiglu", [gate, up])[0])
    _run(activation.swiglu_backward, grid, dy, fused, dfused, width, width // leaves, BLOCK=16)
    (dgate, dup), _ = REFERENCE.backward("swiglu", [gate, up], [dy])
    assert _equal(dfused, fuse(dgate, dup))


def test_embedding_and_sums() -> None:
    ids = torch.tensor([3, 1, 3, 0, 3, 1])
    table, dh, grad = _random(5, 20), _random(6, 20, seed=1), _random(5, 20, seed=2)
    out = torch.empty(6, 20)
    _run(embedding.embedding, (6, 2), table, ids, out, 20, BLOCK=16)
    assert _equal(out, table[ids])
    expected = grad.clone()
    for token, row in zip(ids.tolist(), dh, strict=True):
        expected[token] = expected[token] + row
    ordered, order = torch.sort(ids, stable=True)
    found, counts = torch.unique_consecutive(ordered, return_counts=True)
    first = torch.tensor([0, *counts.cumsum(0).tolist()])
    _run(embedding.embedding_gradient, (len(found), 2), dh, order, found, first, grad, len(found), 20, BLOCK=16)
    assert _equal(grad, expected)
    total, expected_total = _random(20, seed=3), None
    expected_total = total.clone()
    for row in dh:
        expected_total = expected_total + row
    _run(norm_backward.column_sum, (1,), dh, total, 6, 20, COLUMNS=32, BLOCK=4, STAGES=1)
    assert _equal(total, expected_total)
    added = torch.empty_like(dh)
    _run(residual.residual_add, (2,), dh, out, added, dh.numel(), BLOCK=64)
    assert _equal(added, dh + out)


@pytest.mark.parametrize("kl", KL_TERMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_loss(policy: str, kl: str) -> None:
    count = 300
    new, old, reference, advantage, weight = (_random(count, seed=seed) for seed in range(5))
    new[5], old[6], advantage[7] = torch.nan, -torch.inf, torch.inf
    trained = torch.arange(count) % 5 != 0
    inputs = LossInputs(new, old, reference, advantage, weight, trained)
    constants = LossConstants(policy, kl, 0.75, 1.25, 0.125)
    expected = token_losses(CONTRACT.entries[("optimizer_step", "loss")], constants, inputs)
    outputs = [torch.full((count,), 7.0) for _ in range(4)]
    clipped = torch.full((count,), 7, dtype=torch.int8)
    _run(
        loss.token_loss, (3,), new, old, reference, advantage, weight, trained.to(torch.int8), *outputs, clipped,
        count, 0.75, 1.25, 0.125, CLIPS=policy == "ppo_clip", KL=KL_TERMS.index(kl), BLOCK=128,
    )  # fmt: skip
    for name, found in zip(("loss", "coefficient", "ratio", "kl"), outputs, strict=True):
        assert _equal(found, expected[name]), name
    assert torch.equal(clipped.bool(), expected["clipped"]) and int(clipped.max()) <= 1


SCALARS = tuple(np.float32(x) for x in (1e-3, 0.9, 0.95, 0.1, 0.05, 3.1, 2.2, 1e-8, 0.1))


def test_optimizer() -> None:
    norm, step = (CONTRACT.entries[("optimizer_step", kind)] for kind in ("gradient_norm", "adamw"))
    g = _random(3 * 1024 + 300)
    sums = torch.full((4,), torch.nan)
    _run(optimizer.square_leaves, (2,), g, sums, g.numel(), LEAF=1024, LANES=256, ROWS=2)
    assert int(torch.isnan(sums).sum()) == 1
    _run(optimizer.square_rest, (1,), g, sums[3:], 3 * 1024, N=300, LANES=256)
    total = torch.full((1,), torch.nan)
    _run(optimizer.tree_level, (1,), sums, total, 4, WIDTH=8)
    assert _equal(total, reference_optimizer.sum_of_squares(norm, g).reshape(1))
    totals, found, clip = torch.cat([total, torch.tensor([2.5])]), torch.empty(1), torch.empty(1)
    for limit in (1.0, 1e30):
        _run(optimizer.norm_and_clip, (1,), totals, found, clip, 2, limit)
        expected = arith.sqrt(arith.add(arith.add(torch.zeros(1), total), torch.tensor([2.5])))
        assert _equal(found, expected) and _equal(clip, reference_optimizer.clip_factor(expected, limit))
    master, m, v, weight = _random(300, seed=1), _random(300, seed=2), _random(300, seed=3).abs(), torch.empty(300)
    scalars = AdamWScalars(*SCALARS, clip=np.float32(0.5))
    expected_all = reference_optimizer.adamw(step, master, m, v, g[:300], scalars)
    device = torch.tensor([float(x) for x in SCALARS])
    _run(optimizer.adamw, (2,), master, m, v, g, weight, device, torch.tensor([0.5]), 300, BLOCK=256)
    for x, y in zip((master, m, v, weight), expected_all, strict=True):
        assert _equal(x, y)
