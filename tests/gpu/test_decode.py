"""Decode attention of sm_90 on a GPU: the bits of the plain kernels, whatever the pages, positions and programs."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a GPU of sm_90", allow_module_level=True)

from dataclasses import replace

from rlkernel.contract.profiles import EX2_SM90, MMA_SM90
from rlkernel.kernels.triton.attention_points import AttentionPoints
from rlkernel.kernels.triton.launch_attention import attention_decode
from rlkernel.kernels.triton.launch_decode import decode_attention

DEVICE = torch.device("cuda")
PAGE = 16
POINTS = AttentionPoints(MMA_SM90, EX2_SM90, 128, 8, 2048, 0.12751743, "bfloat16")


def _case(kind: str, sequences: int, heads: tuple[int, int], depth: int, longest: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(DEVICE).manual_seed(sequences + depth + longest)

    def values(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=DEVICE)
        if kind == "spread":
            x = torch.ldexp(x, torch.randint(-12, 13, shape, generator=generator, device=DEVICE, dtype=torch.int32))
        if kind == "ties":
            x = x.sign()
        return x.bfloat16()

    blocks = -(-longest // PAGE)
    caches = [values(sequences * blocks + 1, PAGE, heads[1], depth) for _ in range(2)]
    order = torch.randperm(sequences * blocks, generator=generator, device=DEVICE)
    table = (1 + order).to(torch.int32).reshape(sequences, blocks)
    positions = torch.randint(0, longest, (sequences,), generator=generator, device=DEVICE, dtype=torch.int32)
    positions[0] = longest - 1
    if sequences > 2:
        positions[1], positions[2] = -1, 0
    for s, position in enumerate(positions.tolist()):  # what lies beyond a sequence must not be seen
        page, place = table[s, max(position, 0) // PAGE], max(position, 0) % PAGE
        for cache in caches:
            cache[page, place + 1 :] = torch.nan
            cache[table[s, max(position, 0) // PAGE + 1 :].long()] = torch.nan
    for cache in caches:
        cache[0] = torch.nan
    return values(sequences, heads[0], depth), *caches, table.contiguous(), positions


@pytest.mark.parametrize("kind", ["normal", "spread", "ties"])
@pytest.mark.parametrize(
    ("sequences", "heads", "depth", "longest"),
    [
        (1, (16, 8), 128, 531),
        (1, (16, 8), 128, 128),
        (5, (32, 8), 128, 129),
        (40, (16, 8), 128, 700),
        (3, (14, 2), 64, 2048),
        (3, (8, 8), 128, 4100),
        (24, (9, 3), 64, 2500),
    ],
)
def test_the_bits_are_those_of_the_plain_kernels(
    kind: str, sequences: int, heads: tuple[int, int], depth: int, longest: int
) -> None:
    case = _case(kind, sequences, heads, depth, longest)
    splits = -(-longest // POINTS.split)
    expected = attention_decode(*case, splits, POINTS)[0]
    assert torch.isfinite(expected.float()).all()
    for overlaps in (False, True):
        found = decode_attention(*case, splits, POINTS, overlaps=overlaps)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    # room for more splits than any sequence has
    found = decode_attention(*case, splits + 1, POINTS)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_other_points_go_to_the_plain_kernels() -> None:
    case = _case("normal", 3, (4, 2), 128, 300)
    points = replace(POINTS, key_block=64)
    expected = attention_decode(*case, 1, points)[0]
    assert torch.equal(decode_attention(*case, 1, points).view(torch.int16), expected.view(torch.int16))
