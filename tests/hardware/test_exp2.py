"""The hardware exp2 of sm_90: the table, and the model around it."""

from __future__ import annotations

import zlib
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

import hardware.cuda.exp2 as module
from hardware.cuda.exp2 import STEPS, ex2_approx_ftz_sm90, table


def _bits(x: torch.Tensor) -> list[int]:
    return [int(b) & 0xFFFFFFFF for b in x.view(torch.int32).reshape(-1)]


def test_the_table_is_the_measured_one() -> None:
    values = table()  # checks both digests
    assert values.shape == (STEPS + 1,) and values.dtype == np.float32
    assert values[0] == 1 and values[-1] == 0.5 and not values.flags.writeable
    nearest = module._nearest_powers()
    residual, counts = np.unique(values.view(np.int32) - nearest.view(np.int32), return_counts=True)
    assert dict(zip(residual.tolist(), counts.tolist(), strict=True)) == {-2: 86537, -1: 4959061, 0: 3342936, 1: 75}


def test_the_nearest_powers_are_correctly_rounded() -> None:
    nearest = module._nearest_powers()
    with mpmath.workprec(120):
        for k in [0, 1, 2, 3, 2047, 2048, 2049, STEPS - 1, STEPS, *range(1234, STEPS, 20011)]:
            exact = mpmath.power(2, mpmath.mpf(-k) / STEPS)
            below, above = (mpmath.mpf(float(np.nextafter(nearest[k], np.float32(x)))) for x in (0, 2))
            value = mpmath.mpf(float(nearest[k]))
            assert abs(value - exact) <= min(abs(below - exact), abs(above - exact)), k


def test_a_damaged_table_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    raw = bytearray(
        zlib.decompress(Path(module.__file__).with_name("data").joinpath(Path(module._FILE).name).read_bytes())
    )
    raw[1000] ^= 1
    (tmp_path / "data").mkdir()
    (tmp_path / module._FILE).write_bytes(zlib.compress(bytes(raw)))
    monkeypatch.setattr(module, "files", lambda _package: tmp_path)
    with pytest.raises(ValueError, match=r"the residuals .* have SHA-256 .* measured on an H200"):
        table.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(module, "_nearest_powers", lambda: np.ones(STEPS + 1, np.float32))
    with pytest.raises(ValueError, match=r"the table of ex2.approx.ftz rebuilt from them have SHA-256"):
        table.__wrapped__()


def test_borders() -> None:
    inf, nan, tiny = float("inf"), float("nan"), 2.0**-126
    x = torch.tensor(
        [0.0, -0.0, -tiny / 2, -tiny, -1.0, -126.0, -np.nextafter(np.float32(126), np.float32(127)), -150.0, -inf]
    )
    assert _bits(ex2_approx_ftz_sm90(x)) == [0x3F800000] * 4 + [0x3F000000, 0x00800000, 0, 0, 0]
    assert bool(ex2_approx_ftz_sm90(torch.tensor([nan])).isnan())
    assert ex2_approx_ftz_sm90(torch.zeros(0, 3)).shape == (0, 3)


def test_the_model_by_its_words() -> None:
    generator = np.random.default_rng(2)
    patterns = generator.integers(0x80000000, 0xC2FC0001, 4000, np.uint32)  # -0 to -126
    x = np.concatenate([patterns.view(np.float32), -(generator.random(4000, np.float32) * np.float32(126))])
    values, found = table(), ex2_approx_ftz_sm90(torch.from_numpy(x)).numpy()
    for one, result in zip(x.tolist(), found, strict=True):
        a = 0.0 if abs(one) < 2.0**-126 else abs(one)
        n = int(a)
        expected = float(values[int((a - n) * STEPS)]) * 2.0**-n
        assert float(result) == (expected if expected >= 2.0**-126 else 0.0), one


def test_positive_inputs_and_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 inputs of ex2.approx.ftz are positive, for instance 1.5; it was measured"):
        ex2_approx_ftz_sm90(torch.tensor([-1.0, 1.5, 3.0]))
    with pytest.raises(ValueError, match=r"float32, not torch.float64"):
        ex2_approx_ftz_sm90(torch.zeros(1, dtype=torch.float64))
