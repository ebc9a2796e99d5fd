"""Shape classes that an admission has to have gone through, region by region: what a certificate must list to count."""

from __future__ import annotations

ALONE = "a row without its neighbours"
VIEWS = "views that are not contiguous"
VIEWS_REFUSED = f"{VIEWS} (refused)"

_ROWS = ("zero rows", "one row", "many rows", ALONE)
_NORM = (*_ROWS, "few rows", "an axis that is no multiple of the lanes")
_PAIRWISE = (*_ROWS, "few rows")
_LINEAR = (*_ROWS, "few rows", "K not a multiple of the tile", "a leaf of one tile", "a leaf of one element")

_CLASSES: dict[str, tuple[str, ...]] = {
    "embedding": (*_ROWS, "few rows"),
    "rms_norm": _NORM,
    "final_norm": _NORM,
    "qk_norm": (*_ROWS, "few rows"),
    "rope": _ROWS,
    "residual_add": _PAIRWISE,
    "swiglu": _PAIRWISE,
    **dict.fromkeys(("qkv_proj", "gate_up_proj", "o_proj", "down_proj"), _LINEAR),
    "logprob": (*_ROWS, "few rows", "padding of the vocabulary", "K not a multiple of the tile", "one column"),
    "gradient_norm": ("zero rows", "few rows", "many rows", "a leaf of one tile", "K not a multiple of the tile"),
    "adamw": ("zero rows", "many rows"),
    "loss": ("zero rows", "many rows"),
}
_WHOLE = ("few rows", "block borders", "several blocks", "an empty sequence", ALONE)
_ATTENTION: dict[str, tuple[str, ...]] = {
    "backward": _WHOLE,
    "whole": (*_WHOLE, "fully masked blocks", "split borders"),
    "paged": ("few rows", "one row each", "chunks", "pages of one block", "stale NaN in unused pages", ALONE),
}


def required_classes(region: str, case: str) -> frozenset[str]:
    """Shape classes of a region in a case; empty for a region that the admission has no problems for."""
    if region != "attention":
        return frozenset(_CLASSES.get(region, ()))
    kind = "backward" if case == "trainer_backward" else "paged" if case.startswith("rollout") else "whole"
    return frozenset(_ATTENTION[kind])
