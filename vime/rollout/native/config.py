"""Configuration of the embedded rollout engine, and how many KV blocks it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.errors import InputError

InFlightUpdates = Literal["refuse", "recompute", "keep_kv"]
IN_FLIGHT_UPDATES: tuple[InFlightUpdates, ...] = ("refuse", "recompute", "keep_kv")


@dataclass(frozen=True)
class EngineConfig:
    """How the engine schedules. No field changes a token, a log-probability or a digest.

    Attributes:
        engine_id: name that is written beside every sample.
        max_num_seqs: most sequences that run at the same time.
        max_batched_tokens: most tokens of one forward pass; a longer prompt is prefilled in chunks.
        block_size: tokens a KV block (page), a multiple of 8.
        num_blocks: KV blocks a layer (one more, the null page, is allocated beside them).
        prefix_caching: share full blocks of equal token prefixes.
        max_position: longest sequence, prompt and response together, in tokens.
        seed: the run's seed; with sample, position and vocabulary id it keys the sampler.
        in_flight_updates: what a weight commit does to unfinished sequences. ``refuse`` it; ``recompute`` their KV
            with the new weights; ``keep_kv`` continues on the old KV (those tokens are not comparable, and say so
            by the version interval of the KV that they read).
    """

    engine_id: str
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    num_blocks: int
    prefix_caching: bool
    max_position: int
    seed: int
    in_flight_updates: InFlightUpdates = "refuse"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batched_tokens", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise InputError(f"engine {self.engine_id}: {name} = {getattr(self, name)}; at least 1 is needed")
        if self.block_size % 8:
            raise InputError(f"engine {self.engine_id}: block_size = {self.block_size} is not a multiple of 8")
        if self.max_position < 2:
            raise InputError(
                f"engine {self.engine_id}: max_position = {self.max_position}; a prompt token and a response token "
                "need at least 2"
            )
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"engine {self.engine_id}: seed = {self.seed} is outside 0 .. 2^64 - 1")
        if self.in_flight_updates not in IN_FLIGHT_UPDATES:
            raise InputError(
                f"engine {self.engine_id}: in_flight_updates = {self.in_flight_updates!r}; "
                f"one of {', '.join(IN_FLIGHT_UPDATES)} is accepted"
            )

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks of a sequence of ``max_position`` tokens."""
        return blocks_of(self.max_position, self.block_size)


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // block_size)


def default_num_blocks(
    *, max_num_seqs: int, tokens_per_sequence: int, block_size: int, bytes_per_block: int, memory_bytes: int
) -> int:
    """Blocks so that ``max_num_seqs`` sequences never wait for one, or as many as the memory holds.

    Args:
        tokens_per_sequence: longest sequence that will be generated (at most the context).
        bytes_per_block: keys and values of one block over all layers (:meth:`KVShape.bytes_per_block`).
        memory_bytes: memory that the KV cache may take.

    Raises:
        InputError: the memory does not hold one sequence.
    """
    each = blocks_of(tokens_per_sequence, block_size)
    # the null page is part of what is allocated
    affordable = memory_bytes // bytes_per_block - 1
    if affordable < each:
        raise InputError(
            f"one sequence of {tokens_per_sequence} tokens needs {each + 1} KV blocks of {bytes_per_block} bytes "
            f"(the null page included), {(each + 1) * bytes_per_block} bytes; memory for KV is {memory_bytes} bytes"
        )
    return min(max_num_seqs * each, affordable)
