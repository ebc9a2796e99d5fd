"""Vector instructions of gfx942 whose first operand comes from another lane (DPP)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hardware.listing import Instruction
from rlkernel.verify.audit.gcn.state import ALL, LANES, WaveState, to_mask
from rlkernel.verify.audit.gcn.vector import Handler
from rlkernel.verify.audit.words import NotModelled, Word

_SCRATCH = 1 << 20  # a register number that no kernel has
_CONTROLS = ("quad_perm", "row_shr", "row_shl", "row_ror", "row_bcast", "row_newbcast")
_MIRRORS = {"row_mirror": 16, "row_half_mirror": 8}


def execute(w: WaveState, i: Instruction, handler: Handler) -> None:
    """Run the handler with the moved operand. Lanes without a source read 0 (``bound_ctrl``), or keep their result.

    Raises:
        NotModelled: a movement that is not one of quad_perm, row_shr, row_shl, row_ror, row_bcast and the mirrors.
    """
    if i.modifiers.get("row_mask", "0xf") != "0xf" or i.modifiers.get("bank_mask", "0xf") != "0xf":
        masked = _masked_lanes(i)
    else:
        masked = np.ones(LANES, dtype=np.bool_)
    source, valid = _sources(i)
    word = w.vector(i.operands[1])
    zero_outside = "bound_ctrl" in i.modifiers
    moved = Word(
        np.where(valid, word.bits[source], np.uint32(0)),
        np.where(valid, word.low[source], np.uint64(0)),
        np.where(valid, word.high[source], np.uint64(0)),
    )
    written = masked if zero_outside else masked & valid
    saved = w.special["exec"]
    w.v[("v", _SCRATCH)] = moved
    w.set_scalar("exec", saved & to_mask(written), 2)
    try:
        handler(w, (i.operands[0], f"v{_SCRATCH}", *i.operands[2:]), replace(i, modifiers={}))
    finally:
        w.set_scalar("exec", saved & ALL, 2)


def _masked_lanes(i: Instruction) -> NDArray[np.bool_]:
    rows, banks = (int(i.modifiers.get(name, "0xf"), 0) for name in ("row_mask", "bank_mask"))
    lane = np.arange(LANES)
    return np.asarray((rows >> (lane // 16) & 1 == 1) & (banks >> (lane % 16 // 4) & 1 == 1))


def _sources(i: Instruction) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    lane = np.arange(LANES)
    place, every = lane % 16, np.ones(LANES, dtype=np.bool_)
    control = next((name for name in _CONTROLS if name in i.modifiers), "")
    value = i.modifiers.get(control, "")
    if control == "quad_perm":
        order = np.array([int(x) for x in value.strip("[]").split(",")])
        return lane // 4 * 4 + order[lane % 4], every
    if control in ("row_shr", "row_shl"):
        shift = -int(value) if control == "row_shr" else int(value)
        inside = (place + shift >= 0) & (place + shift < 16)
        return np.where(inside, lane + shift, lane), inside
    if control == "row_ror":
        return lane // 16 * 16 + (place - int(value)) % 16, every
    if control == "row_bcast" and value == "15":
        return np.maximum(lane // 16 * 16 - 1, 0), lane >= 16
    if control == "row_bcast" and value == "31":
        return np.full(LANES, 31), lane >= 32
    if control == "row_newbcast":
        return lane // 16 * 16 + int(value), every
    for mirror, width in _MIRRORS.items():
        if mirror in i.modifiers:
            return lane // width * width + width - 1 - lane % width, every
    raise NotModelled("this movement between lanes has no model")
