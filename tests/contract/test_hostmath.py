"""Host mathematics against mpmath, and the bits it must never change."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.contract import hostmath
from rlkernel.errors import ContractError


def ulps(computed, exact) -> float:
    """Largest distance in units of the exact value's last place."""
    pairs = [(mpmath.mpf(float(c)), e) for c, e in zip(computed, exact, strict=True) if e != 0]
    return max(float(abs(c - e) / mpmath.mpf(float(np.spacing(abs(float(e)))))) for c, e in pairs)


def exact(function, values):
    with mpmath.workprec(200):
        return [function(mpmath.mpf(float(v))) for v in values]


@pytest.mark.parametrize("scale", [0.8, 10.0, 1e4, 1e6, hostmath.MAX_ANGLE])
def test_sin_cos_within_one_ulp(scale):
    generator = np.random.default_rng(7)
    x = np.concatenate(
        [
            generator.uniform(-scale, scale, 400),
            np.round(generator.uniform(-scale, scale, 100)),
            np.round(generator.uniform(0, scale * 0.6, 100)) * (np.pi / 2),  # next to zeros: the reduction cancels
        ]
    )
    x = x[np.abs(x) <= hostmath.MAX_ANGLE]
    with mpmath.workprec(200):
        sine, cosine = hostmath.sin_cos(x)
        assert ulps(sine, exact(mpmath.sin, x)) < 1.0
        assert ulps(cosine, exact(mpmath.cos, x)) < 1.0


def test_the_accuracy_test_notices_a_short_reduction(monkeypatch):
    """With pi/2 cut to 60 bits, large angles next to multiples of pi/2 are wrong: the test above would fail."""
    monkeypatch.setattr(hostmath, "_HALF_PI", hostmath._HALF_PI[:2])
    x = np.round(np.random.default_rng(7).uniform(0, 2e6, 100)) * (np.pi / 2)
    with mpmath.workprec(200):
        assert ulps(hostmath.sin(x), exact(mpmath.sin, x)) > 1.0


def test_exp_and_log_within_one_ulp():
    generator = np.random.default_rng(3)
    x = np.concatenate([generator.uniform(-700, 700, 400), generator.uniform(-1, 1, 200)])
    positive = np.concatenate([np.exp(x[:400]), generator.uniform(0.5, 2.0, 200), [5e-324, 1 - 2**-53, 1 + 2**-52]])
    with mpmath.workprec(200):
        assert ulps(hostmath.exp(x), exact(mpmath.exp, x)) < 1.0
        assert ulps(hostmath.log(positive), exact(mpmath.log, positive)) < 0.51


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6, 1e7])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_rational_power_within_one_ulp(theta, dim):
    numerators = -np.arange(0, dim, 2, dtype=np.float64)
    with mpmath.workprec(200):
        wanted = [mpmath.mpf(theta) ** (mpmath.mpf(int(n)) / dim) for n in numerators]
        assert ulps(hostmath.rational_power(theta, numerators, dim), wanted) < 0.6


def test_exact_points():
    assert hostmath.exp(0.0) == 1.0
    assert hostmath.log(1.0) == 0.0
    assert hostmath.cos(0.0) == 1.0
    assert np.signbit(hostmath.sin(-0.0))
    assert not np.signbit(hostmath.sin(0.0))
    assert hostmath.power(2.0, 10.0) == 1024.0
    assert hostmath.rational_power(10000.0, 0.0, 64) == 1.0


@settings(max_examples=100, deadline=None)
@given(st.floats(-hostmath.MAX_ANGLE, hostmath.MAX_ANGLE))
def test_values_do_not_depend_on_the_array_around_them(angle):
    around = np.linspace(-3.0, 3.0, 17)
    alone = [np.float64(v).view(np.int64) for v in hostmath.sin_cos(angle)]
    among = [v[5].view(np.int64) for v in hostmath.sin_cos(np.insert(around, 5, angle))]
    assert alone == among
    mirrored = hostmath.sin_cos(-angle)
    assert np.float64(mirrored[1]).view(np.int64) == alone[1]
    assert np.float64(-mirrored[0]).view(np.int64) == alone[0]


def test_bits_are_pinned():
    """The same bits on every machine: a changed digest is a changed contract."""
    x = np.arange(-2000, 2000, dtype=np.float64) * 1.37
    sine, cosine = hostmath.sin_cos(x)
    powers = hostmath.rational_power(1e6, -np.arange(0, 128, 2, dtype=np.float64), 128)
    exponentials, logarithms = hostmath.exp(x / 8), hostmath.log(np.abs(x) + 0.5)
    data = b"".join(v.astype("<f8").tobytes() for v in (sine, cosine, powers, exponentials, logarithms))
    assert hashlib.sha256(data).hexdigest() == "c2d156cda14c0513696c8dab42a48ed59cd7baad4a2b2af37412096dad6c9632"


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (hostmath.sin, 2.0**22 + 1),
        (hostmath.cos, float("nan")),
        (hostmath.exp, 701.0),
        (hostmath.exp, float("nan")),
        (hostmath.log, 0.0),
        (hostmath.log, -1.0),
        (hostmath.log, float("inf")),
        (hostmath.log, float("nan")),
    ],
)
def test_outside_the_domain_is_an_error(function, value):
    with pytest.raises(ContractError):
        function(np.array([1.0, value]))


@pytest.mark.parametrize("module", ["hostmath", "rope_tables", "schedules"])
def test_no_transcendental_function_of_a_library(module):
    """Only attributes of NumPy that are exact or correctly rounded occur in these modules."""
    path = Path(hostmath.__file__).with_name(f"{module}.py")
    tree = ast.parse(path.read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "np"}
    allowed = {
        "abs", "arange", "array", "asarray", "ascontiguousarray", "ceil", "clip", "empty", "float32", "float64",
        "floor", "full", "full_like", "inf", "int64", "ones_like", "shape", "where", "zeros_like",
    }  # fmt: skip
    assert used <= allowed, used - allowed
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not imported & {"math", "cmath", "scipy", "torch"}
