"""Shape classes that an admission has to have gone through, region by region: what a certificate must list to count."""

from __future__ import annotations

ALONE = "a row without its neighbours"
VIEWS = "views that are not contiguous"
VIEWS_REFUSED = f"{VIEWS} (refused)"

LINEAR = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
NEIGHBOURS = "rows beside NaN"

_ROWS = ("zero rows", "one row", "many rows", ALONE, NEIGHBOURS)
_NORM = (*_ROWS, "few rows", "an axis that is no multiple of the lanes")
_PAIRWISE = (*_ROWS, "few rows", "an odd number of elements")
_LEAVES = ("a leaf of one tile", "a leaf of one element")
_LINEAR = (*_ROWS, "few rows", "two rows", "K not a multiple of the tile", "a long chain", *_LEAVES)

_CLASSES: dict[str, tuple[str, ...]] = {
    "embedding": (*_ROWS, "few rows", "many ids"),
    "rms_norm": _NORM,
    "final_norm": _NORM,
    "qk_norm": (*_ROWS, "few rows"),
    "rope": (*_ROWS, "few rows", "many heads"),
    "residual_add": _PAIRWISE,
    "swiglu": _PAIRWISE,
    **dict.fromkeys(LINEAR, _LINEAR),
    "logprob": (
        *_ROWS, "few rows", "padding of the vocabulary", "K not a multiple of the tile", "one column", "many leaves",
        "a long chain",
    ),
    "gradient_norm": (
        "zero rows", "few rows", "many rows", "a leaf of one tile", "K not a multiple of the tile", "many leaves",
    ),
    "adamw": ("zero rows", "many rows", "many elements"),
    "loss": ("zero rows", "many rows"),
}  # fmt: skip
_WHOLE = ("few rows", "block borders", "several blocks", "an empty sequence", ALONE, NEIGHBOURS)
_ATTENTION: dict[str, tuple[str, ...]] = {
    "backward": (*_WHOLE, "many blocks"),
    "whole": (*_WHOLE, "fully masked blocks", "split borders", "many splits"),
    "paged": (
        *("few rows", "one row each", "chunks", "pages of one block", "stale NaN in unused pages", "many splits"),
        *(ALONE, NEIGHBOURS),
    ),
}


def required_classes(region: str, case: str) -> frozenset[str]:
    """Shape classes of a region in a case; empty for a region that the admission has no problems for."""
    if region != "attention":
        classes = _CLASSES.get(region, ())
        return frozenset((*classes, "many tokens") if region in LINEAR and case == "trainer_backward" else classes)
    kind = "backward" if case == "trainer_backward" else "paged" if case.startswith("rollout") else "whole"
    return frozenset(_ATTENTION[kind])
