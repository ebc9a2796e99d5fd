"""Which deviations are tried for a region in a case, the special ones first."""

from __future__ import annotations

from rlkernel.verify.admission.certificate import BACKWARD
from rlkernel.verify.admission.variants import Variation
from rlkernel.verify.admission.variations import ELEMENTWISE, GENERIC
from rlkernel.verify.admission.variations_attention import (
    ADAMW,
    ATTENTION,
    ATTENTION_BACKWARD,
    GRADIENT_NORM,
    LOSS,
)
from rlkernel.verify.admission.variations_regions import (
    EMBEDDING_BACKWARD,
    HEAD,
    HEAD_BACKWARD,
    LINEAR,
    LINEAR_BACKWARD,
    NORM,
    NORM_BACKWARD,
    ROPE,
    SWIGLU,
    SWIGLU_BACKWARD,
)

_FORWARD: dict[str, tuple[Variation, ...]] = {
    **dict.fromkeys(("rms_norm", "final_norm", "qk_norm"), NORM + ELEMENTWISE),
    **dict.fromkeys(("o_proj", "gate_up_proj", "down_proj", "qkv_proj"), LINEAR + ELEMENTWISE),
    "embedding": ELEMENTWISE,
    "residual_add": ELEMENTWISE,
    "rope": ROPE + ELEMENTWISE,
    "swiglu": SWIGLU + ELEMENTWISE,
    "attention": ATTENTION + ELEMENTWISE,
    "logprob": HEAD + ELEMENTWISE,
    "adamw": ADAMW,
    "gradient_norm": GRADIENT_NORM,
    "loss": LOSS,
}
_BACKWARD: dict[str, tuple[Variation, ...]] = {
    **dict.fromkeys(("rms_norm", "final_norm", "qk_norm"), NORM_BACKWARD + NORM),
    **dict.fromkeys(("o_proj", "gate_up_proj", "down_proj", "qkv_proj"), LINEAR_BACKWARD),
    "rope": ROPE + ELEMENTWISE,
    "swiglu": SWIGLU_BACKWARD + SWIGLU + ELEMENTWISE,
    "attention": ATTENTION_BACKWARD,
    "logprob": HEAD_BACKWARD + HEAD,
    "embedding": EMBEDDING_BACKWARD,
}


def variations_for(region: str, case: str) -> tuple[Variation, ...]:
    """Deviations of a region in a case: its own, then those that any region may have."""
    own = (_BACKWARD if case == BACKWARD else _FORWARD).get(region, ())
    return own + GENERIC
