"""Dispatch of matrix products on a GPU of sm_90: all routes give the same bits, a library that differs is caught."""

from __future__ import annotations

import pytest
import torch

from rlkernel.errors import ContractError, NumericsError

if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a GPU of sm_90", allow_module_level=True)

from rlkernel.kernels import products as products_module
from rlkernel.kernels.products import Products
from rlkernel.kernels.triton import launch
from rlkernel.kernels.triton.launch import Tile
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
