"""Scalar instructions of gfx942: the arithmetic that addresses and loops are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlkernel.verify.audit.gcn.state import ALL, MASK32, WaveState
from rlkernel.verify.audit.words import NotModelled

IGNORED = ("s_waitcnt", "s_nop", "s_setprio", "s_sleep", "s_inst_prefetch", "s_clause", "s_sched", "s_set_gpr_idx")


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 & 1 else value


_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
_BITWISE: Mapping[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


def execute_scalar(wave: WaveState, opcode: str, operands: Sequence[str]) -> bool:
    """Execute a scalar instruction that neither branches nor touches memory. False: it has no model here."""
    name, _, kind = opcode.removeprefix("s_").rpartition("_")
    wide = 2 if kind.endswith("64") else 1
    if name.startswith("cmpk_") or name.startswith("cmp_"):
        return _compare(wave, name, kind, operands)
    if name in ("bitcmp0", "bitcmp1"):
        bit = wave.scalar(operands[0], wide) >> (wave.scalar(operands[1], 1) % (32 * wide)) & 1
        wave.special["scc"] = int(bit == int(name[-1]))
        return True
    if name in _BITWISE and kind in ("b32", "b64"):
        value = _BITWISE[name](wave.scalar(operands[1], wide), wave.scalar(operands[2], wide)) & ((1 << 32 * wide) - 1)
        wave.set_scalar(operands[0], value, wide)
        wave.special["scc"] = int(value != 0)
        return True
    if name.endswith("_saveexec") and name.removesuffix("_saveexec") in _BITWISE:
        old, source = wave.special["exec"], wave.scalar(operands[1], 2)
        operation = name.removesuffix("_saveexec")
        new = source & ~old if operation == "andn2" else _BITWISE[operation](source, old)
        wave.set_scalar(operands[0], old, 2)
        wave.set_scalar("exec", new & ALL, 2)
        wave.special["scc"] = int(new & ALL != 0)
        return True
    return _arithmetic(wave, name, kind, wide, operands)


def _compare(wave: WaveState, name: str, kind: str, operands: Sequence[str]) -> bool:
    comparison = name.split("_")[1]
    wide = 2 if kind.endswith("64") else 1
    a, b = wave.scalar(operands[0], wide), wave.scalar(operands[1], wide)
    if name.startswith("cmpk_") and kind == "u32":
        b &= 0xFFFF
    if kind == "i32":
        a, b = _signed(a), _signed(b)
    if comparison not in _COMPARE:
        return False
    wave.special["scc"] = int(_COMPARE[comparison](a, b))
    return True


def _arithmetic(wave: WaveState, name: str, kind: str, wide: int, operands: Sequence[str]) -> bool:
    sources = [wave.scalar(text, wide) for text in operands[1:3]]
    scc = wave.special["scc"]
    if name in ("mov", "movk", "cmov"):
        if name != "cmov" or scc:
            wave.set_scalar(operands[0], sources[0], wide)
        return True
    if name == "cselect":
        wave.set_scalar(operands[0], sources[0] if scc else sources[1], wide)
        return True
    if name == "not":
        value = ~sources[0] & ((1 << 32 * wide) - 1)
        wave.special["scc"] = int(value != 0)
    elif name in ("lshl", "lshr", "ashr"):
        amount = wave.scalar(operands[2]) & (32 * wide - 1)
        number = sources[0]
        if name == "ashr" and number >> (32 * wide - 1):
            number -= 1 << 32 * wide
        value = number << amount if name == "lshl" else number >> amount
        value &= (1 << 32 * wide) - 1
        wave.special["scc"] = int(value != 0)
    elif name in ("add", "addc", "sub", "subb", "addk", "min", "max", "mul", "mulk", "mul_hi", "abs") and wide == 1:
        if name in ("addk", "mulk"):
            sources = [wave.scalar(operands[0]), sources[0]]
        value = _number(wave, name, kind, sources, scc)
    elif name == "bfe" and kind == "u32":
        value = sources[0] >> (sources[1] & 31) & ((1 << (sources[1] >> 16 & 127)) - 1)
        wave.special["scc"] = int(value != 0)
    elif name == "bfe" and kind == "i32":
        width = sources[1] >> 16 & 127
        field = sources[0] >> (sources[1] & 31) & ((1 << width) - 1)
        value = (field - ((field >> (width - 1)) << width) if width else 0) & MASK32
        wave.special["scc"] = int(value != 0)
    elif name.startswith("lshl") and name.endswith("_add") and wide == 1:
        total = (sources[0] << int(name[4])) + sources[1]
        value = total & MASK32
        wave.special["scc"] = int(total > MASK32)
    elif name == "pack_ll_b32":
        value = sources[0] & 0xFFFF | (sources[1] & 0xFFFF) << 16
    else:
        return False
    wave.set_scalar(operands[0], value, wide)
    return True


def _number(wave: WaveState, name: str, kind: str, sources: list[int], scc: int) -> int:
    signed = kind == "i32"
    a, b = sources[0], sources[1] if len(sources) > 1 else 0
    if name in ("add", "addc", "addk"):
        total = a + b + (scc if name == "addc" else 0)
        overflow = not -(1 << 31) <= _signed(a) + _signed(b) < 1 << 31
        wave.special["scc"] = int(overflow if signed else total > MASK32)
        return total
    if name in ("sub", "subb"):
        total = a - b - (scc if name == "subb" else 0)
        overflow = not -(1 << 31) <= _signed(a) - _signed(b) < 1 << 31
        wave.special["scc"] = int(overflow if signed else total < 0)
        return total
    if name == "mul_hi":
        return (_signed(a) * _signed(b) if signed else a * b) >> 32
    if name in ("mul", "mulk"):
        return a * b
    if name == "abs":
        value = abs(_signed(a))
        wave.special["scc"] = int(value != 0)
        return value
    left, right = (_signed(a), _signed(b)) if signed else (a, b)
    chosen = min(left, right) if name == "min" else max(left, right)
    wave.special["scc"] = int(chosen == left)
    if name not in ("min", "max"):
        raise NotModelled(f"scalar operation {name}")
    return chosen
