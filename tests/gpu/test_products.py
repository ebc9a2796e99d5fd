"""Dispatch of matrix products on a GPU of sm_90: all routes give the same bits, a library that differs is caught."""

from __future__ import annotations

import pytest
import torch

from rlkernel.errors import ContractError, NumericsError

if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a GPU of sm_90", allow_module_level=True)

from rlkernel.kernels import products as products_module
from rlkernel.kernels.products import Products
from rlkernel.kernels.triton import launch, launch_attention, launch_heads, launch_rows
from rlkernel.kernels.triton.launch import Tile
from rlkernel.kernels.triton.launch_hopper import gemm_hopper
from rlkernel.kernels.triton.tiles import SHARED_BYTES, HopperTile, few_rows_tile
from rlkernel.kernels.vendor.admission import AdmissionTable
from rlkernel.kernels.vendor.cublas import use_cublaslt, vendor_gemm

DEVICE = torch.device("cuda")
PLAIN = Tile(64, 64, 32, num_warps=4, num_stages=2)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).bfloat16()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.shape == b.shape and a.dtype == b.dtype
    integer = torch.int16 if a.element_size() == 2 else torch.int32
    return bool((a.view(integer) == b.view(integer)).all())


@pytest.mark.parametrize("rows", [1, 5, 32, 33, 100, 256])
def test_every_route_gives_the_same_bits(rows: int) -> None:
    table = AdmissionTable()
    exact, own = Products("matrix", DEVICE, admissions=table, check_every=1), Products("matrix", DEVICE)
    x, w, dy = _random(rows, 512), _random(768, 512, seed=1), _random(rows, 768, seed=2)
    padded = max(rows, 32)
    assert exact.admit("forward", padded, 768, 512, "bfloat16").admitted
    assert exact.admit("dgrad", padded, 512, 768, "bfloat16").admitted
    assert exact.describe("forward", rows, 768, 512).kernel == "vendor"
    assert own.describe("forward", rows, 768, 512).kernel != "vendor"
    plain = launch.gemm(x, w, mac="matrix", tile=PLAIN)
    assert _same(exact.forward(x, w), plain) and _same(own.forward(x, w), plain)
    backward = launch.gemm(dy, w, mac="matrix", b_depth_first=True, tile=PLAIN)
    assert _same(exact.dgrad(dy, w), backward) and _same(own.dgrad(dy, w), backward)
    for leaves in (2, 4, 8):
        merged = launch.gemm(x, w, mac="matrix", leaves=leaves, tile=PLAIN)
        assert _same(own.forward(x, w, leaves=leaves), merged) and _same(exact.forward(x, w, leaves=leaves), merged)
    bias = _random(768, seed=3)
    assert _same(exact.forward(x, w, bias=bias), launch.gemm(x, w, mac="matrix", bias=bias, tile=PLAIN))
    counts = exact.counts()
    assert len(counts) == 2 and all(c["checks"] == 1 and c["compared"] and not c["differing"] for c in counts.values())


def test_weight_gradient_continues_one_chain() -> None:
    table = AdmissionTable()
    exact = Products("matrix", DEVICE, admissions=table, check_every=1)
    dy, x = _random(96, 256), _random(96, 384, seed=1)
    assert exact.admit("wgrad", 256, 384, 48, "float32").admitted
    grad, whole = torch.zeros((256, 384), device=DEVICE), torch.zeros((256, 384), device=DEVICE)
    exact.wgrad(dy[:48].contiguous(), x[:48].contiguous(), grad, fresh=True)
    exact.wgrad(dy[48:].contiguous(), x[48:].contiguous(), grad)
    launch.gemm(dy, x, mac="matrix", a_depth_first=True, b_depth_first=True, grad=whole, tile=PLAIN)
    assert _same(grad, whole)
    assert [c["calls"] for c in exact.counts().values()] == [1]
    with pytest.raises(ContractError, match="multiples of 16"):
        exact.wgrad(dy[:17].contiguous(), x[:17].contiguous(), grad)


def _wrong(shape: object, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    result = vendor_gemm(shape, a, b, out)  # type: ignore[arg-type]
    result.view(torch.int16)[3, 7] ^= 1
    return result


def test_a_library_that_differs_is_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkernel.kernels.vendor.cublas.vendor_gemm", _wrong)
    exact = Products("matrix", DEVICE, admissions=AdmissionTable(), check_every=1)
    record = exact.admit("forward", 32, 768, 512, "bfloat16")
    assert not record.admitted and record.differing == 3
    route = exact.describe("forward", 32, 768, 512)
    assert route.kernel != "vendor" and "differed in 3" in route.why


def test_a_library_that_begins_to_differ_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Products("matrix", DEVICE, admissions=AdmissionTable(), check_every=1)
    assert exact.admit("forward", 32, 768, 512, "bfloat16").admitted
    monkeypatch.setattr(products_module, "vendor_gemm", _wrong)
    exact.forward(_random(32, 512), _random(768, 512, seed=1))
    ((_, count),) = exact.counts().items()
    assert count == {"calls": 1, "checks": 1, "compared": 32 * 768, "differing": 1}


def test_settings_that_were_changed_are_refused() -> None:
    exact = Products("matrix", DEVICE, admissions=AdmissionTable())
    assert exact.admit("forward", 32, 768, 512, "bfloat16").admitted
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    try:
        with pytest.raises(NumericsError, match="split-K"):
            exact.forward(_random(32, 512), _random(768, 512, seed=1))
    finally:
        use_cublaslt()


def test_a_captured_product_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Products("matrix", DEVICE)
    x, w, out = _random(8, 512), _random(768, 512, seed=1), torch.zeros((8, 768), device=DEVICE).bfloat16()
    own.forward(x, w, leaves=8, out=out)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.forward(x, w, leaves=8, out=out)
    out.zero_()
    graph.replay()
    assert _same(out, expected)


@pytest.mark.parametrize("rows", [1, 8, 17, 33, 64, 65])
@pytest.mark.parametrize(("columns", "slices"), [(1024, 1), (1024, 2), (12288, 1)])
def test_a_swiglu_of_a_projection_has_the_bits_of_two_kernels(rows: int, columns: int, slices: int) -> None:
    own = Products("matrix", DEVICE)
    assert few_rows_tile(columns, gated=True).wide == (3 if columns == 12288 else 1)
    x, w = _random(rows, 512), _random(columns, 512, seed=1)
    x[0, :16] = -0.0
    expected = launch_rows.swiglu(launch.gemm(x, w, mac="matrix", tile=PLAIN), leaves=slices)
    for overlaps in (False, True):
        assert _same(own.swiglu(x, w, slices=slices, overlaps=overlaps), expected)


@pytest.mark.parametrize("rows", [1, 16, 40, 64, 200])
def test_a_product_that_starts_early_waits_for_its_rows(rows: int) -> None:
    own = Products("matrix", DEVICE)
    w, second, norm = _random(2048, 2048), _random(2048, 2048, seed=1), _random(2048, seed=2)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros((rows, 2048), device=DEVICE, dtype=torch.bfloat16)

    def chain(overlaps: bool) -> torch.Tensor:
        y, branch = x, x
        for _ in range(6):
            _, y, _ = launch_rows.add_rms_norm(y, branch, norm, 1e-6, overlaps=overlaps)
            branch = own.forward(own.forward(y, w, overlaps=overlaps), second, overlaps=overlaps)
        return branch

    chain(True)
    with torch.cuda.graph(graph):
        found = chain(True)
    for seed in range(20):
        x.copy_(_random(rows, 2048, seed=seed))
        graph.replay()
        assert _same(found, chain(False)), seed


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("rows", "q_heads", "kv_heads", "depth"), [(1, 16, 8, 128), (37, 6, 2, 64), (5, 8, 8, 128)])
def test_heads_of_a_decode_step_are_those_of_four_kernels(
    qk_norm: bool, rows: int, q_heads: int, kv_heads: int, depth: int
) -> None:
    fused = _random(rows, (q_heads + 2 * kv_heads) * depth)
    places = launch_heads.fused_places(q_heads, kv_heads, depth)
    angle = torch.rand((64, depth // 2), device=DEVICE) * 6
    positions = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    rotation = launch_heads.Rotation(positions, torch.cos(angle), torch.sin(angle))
    slots = torch.randperm(48, device=DEVICE)[:rows]
    slots[0] = -1
    w = (_random(depth, seed=1), _random(depth, seed=2)) if qk_norm else None
    expected = [torch.zeros((3, 16, kv_heads, depth), device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    rotated = [launch_heads.rope(fused, places[i], rotation, w=w[i] if w else None, eps=1e-6)[0] for i in range(2)]
    v = torch.empty_like(rotated[1])
    launch_heads.copy_heads(v, fused, places[2], gathers=True)
    launch_attention.append_kv(rotated[1], v, *expected, slots)
    for overlaps in (False, True):
        caches = [torch.zeros_like(cache) for cache in expected]
        q = launch_heads.decode_heads(
            fused, rotation, slots, *caches, q_heads, w=w, eps=1e-6, overlaps=overlaps
        )  # fmt: skip
        assert _same(q, rotated[0])
        assert all(_same(cache, other) for cache, other in zip(caches, expected, strict=True))


@pytest.mark.parametrize("columns", [1024, 12288])
@pytest.mark.parametrize(
    "tile", [HopperTile(64, 32, 128, 8, 5, 1, 4, wide=3), HopperTile(64, 64, 64, 8, 4, 1, 4, resident=2)]
)
def test_tiles_side_by_side_and_programs_side_by_side(tile: HopperTile, columns: int) -> None:
    x, w = _random(100, 640), _random(columns, 640, seed=1)
    assert _same(gemm_hopper(x, w, tile=tile), launch.gemm(x, w, mac="matrix", tile=PLAIN))


@pytest.mark.parametrize("tile", [HopperTile(64, 32, 128, 8, 8, 1, 4), HopperTile(128, 128, 64, 8, 4)])
def test_eight_leaves_wait_in_shared_memory_or_in_global(tile: HopperTile) -> None:
    assert (tile.shared_bytes(8, 2, four_shared=True) <= SHARED_BYTES) == (tile.block_n == 32)
    x, w = _random(100, 1024), _random(256, 1024, seed=1)
    assert _same(gemm_hopper(x, w, leaves=8, tile=tile), launch.gemm(x, w, mac="matrix", leaves=8, tile=PLAIN))


@pytest.mark.parametrize("leaves", [2, 4, 8])
@pytest.mark.parametrize(
    "tile", [HopperTile(64, 64, 64, 8, 8, 1, 4, paired=True), HopperTile(128, 64, 64, 8, 6, paired=True)]
)
def test_pairs_of_leaves_have_the_bits_of_leaves_one_after_the_other(tile: HopperTile, leaves: int) -> None:
    x, w, bias = _random(200, 2048), _random(320, 2048, seed=1), _random(320, seed=2)
    found = gemm_hopper(x, w, leaves=leaves, bias=bias, tile=tile)
    assert _same(found, launch.gemm(x, w, mac="matrix", leaves=leaves, bias=bias, tile=PLAIN))
    dy, dgrad = _random(200, 1024, seed=3), _random(1024, 320, seed=4)
    found = gemm_hopper(dy, dgrad, leaves=leaves, b_depth_first=True, tile=tile)
    assert _same(found, launch.gemm(dy, dgrad, mac="matrix", leaves=leaves, b_depth_first=True, tile=PLAIN))
