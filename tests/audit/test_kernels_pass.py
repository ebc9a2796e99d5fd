"""The audit of every kernel of ours passes on both targets, and every output that it executed is proven."""

from __future__ import annotations

import pytest

from rlkernel.verify.audit.catalogue import Audited, audited_kernels
from rlkernel.verify.audit.report import audit
from rlkernel.verify.audit.targets import TARGETS

KERNELS = audited_kernels()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.target.name}-{k.name}-{k.claims}".replace(" ", "_"))
def test_passes(kernel: Audited) -> None:
    result = audit(kernel)
    assert result.passed, "\n".join(map(str, result.violations))
    expected = sum(
        value.size for launch in kernel.launches for value in (*launch.symbols.values(), *launch.values.values())
    )
    assert kernel.launches and sum(proof.outputs for proof in result.proofs) == expected
    if "matrix" in kernel.name:
        assert result.matrix and all(proof.matrix_instructions for proof in result.proofs)


def test_every_kernel_stands_on_both_targets() -> None:
    on = [{k.name.split()[0] for k in KERNELS if k.target is target} for target in TARGETS]
    # an instruction that only sm_90 has, and a chain whose rows gfx942 scales by scalar loads, which have no model
    assert on[0] - on[1] == {"hardware_exp2", "rms_norm_dw"}
    assert not on[1] - on[0]
    profiles = {(k.target.name, k.claims.split()[0]) for k in KERNELS if k.name.startswith("gemm")}
    assert profiles == {("sm_90", "hopper"), ("sm_90", "portable"), ("gfx942", "cdna3"), ("gfx942", "portable")}
