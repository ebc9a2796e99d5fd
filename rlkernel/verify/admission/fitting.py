"""Variations whose constant is read off the candidate's own outputs: an epsilon of another size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.contract.canonical import bits_float32, float32_bits
from rlkernel.verify.admission.symptoms import Seen
from rlkernel.verify.admission.variants import Variation
from rlkernel.verify.admission.variations import constant

_NORMS = ("rms_norm", "final_norm", "qk_norm")
_USUAL = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-7)
_WHOLE = 2.0**-122  # outputs from here on hold most of their bits


def fitted_variations(contract: Contract, region: str, case: str, cases: Sequence[Seen]) -> tuple[Variation, ...]:
    """Another epsilon of a norm: usual ones, and that which its outputs show where the inputs are tiny."""
    if region not in _NORMS:
        return ()
    name = case if (case, region) in contract.entries else "trainer_forward"
    bits = dict(contract.entries[(name, region)].constants).get("eps")
    if bits is None:
        return ()
    own = bits_float32(bits)
    values = dict.fromkeys(float(np.float32(value)) for value in (*_estimates(own, cases), *_USUAL))
    return tuple(
        Variation(
            "primitives",
            f"an epsilon of {_short(value)} (the contract's is {_short(own)})",
            entry=constant("eps", float32_bits(value)),
            only=(region,),
        )
        for value in values
        if value != own
    )


def _short(value: float) -> str:
    """As few digits as tell a float32 from its neighbours."""
    return str(np.float32(value))


def _estimates(own: float, cases: Sequence[Seen]) -> list[float]:
    """Where the mean of the squares is nothing beside epsilon, outputs are x * w / sqrt(epsilon)."""
    found = []
    for case in cases:
        for name, want in case.want.items():
            have = case.have.get(name)
            if have is None or have.shape != want.shape or want.dtype != np.float32 or not want.ndim:
                continue
            for row in range(len(want)):
                if case.problem.hazard((row, *(0,) * (want.ndim - 1))) != "subnormals":
                    continue
                right, wrong = want[row].astype(np.float64), have[row].astype(np.float64)
                usable = (np.abs(right) > _WHOLE) & (np.abs(wrong) > _WHOLE) & np.isfinite(wrong)
                found += (own * (right[usable] / wrong[usable]) ** 2).tolist()
    if not found:
        return []
    median = float(np.median(found))
    return [float(f"{median:.{digits}e}") for digits in range(4)]
