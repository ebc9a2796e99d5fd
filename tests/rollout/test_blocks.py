"""The block manager: no block is lost, freed twice or found under another content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vime.errors import InputError, InvariantViolation
from vime.rollout.native.blocks import ROOT, BlockKey, BlockManager
from vime.rollout.native.config import EngineConfig, default_num_blocks

SIZE = 2


def chain(tokens: list[int]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for first in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = keys[-1].digest if keys else ROOT
        keys.append(BlockKey.of(parent, np.array(tokens[first : first + SIZE], np.int64)))
    return keys


class Blocks(RuleBasedStateMachine):
    """Sequences come, share, fill, and go; ``content`` models what every block holds."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks)
        self.version = 0
        self.held: list[list[int]] = []
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens: list[int]) -> None:
        manager, keys = self.manager, chain(tokens)
        shared = manager.lookup(self.version, keys)
        for index, block in enumerate(shared):
            assert self.content[block] == (self.version, tuple(tokens[: (index + 1) * SIZE]))
        fresh = -(-len(tokens) // SIZE) - len(shared)
        if manager.available - manager.unreferenced(shared) < fresh:
            with pytest.raises(InvariantViolation, match="KV blocks were asked for"):
                manager.allocate(manager.available + 1)
            return
        manager.share(shared)
        new = manager.allocate(fresh)
        assert not set(new) & {block for blocks in self.held for block in blocks} and 0 not in new
        blocks = shared + new
        manager.mark_written(np.array(new, np.int64), self.version)
        for index in range(len(shared), len(blocks)):
            self.content[blocks[index]] = (self.version, tuple(tokens[: (index + 1) * SIZE]))
            if index < len(keys):
                manager.register(blocks[index], self.version, keys[index])
        assert manager.written_by(np.array(blocks), self.version)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.manager.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def commit(self) -> None:
        # sequences of the old version are gone at a commit
        for blocks in self.held:
            self.manager.release(blocks)
        self.held = []
        self.manager.invalidate()
        self.version += 1
        assert self.manager.cached == 0 and self.manager.available == self.manager.num_blocks

    @invariant()
    def consistent(self) -> None:
        self.manager.check()
        counts = np.zeros(self.manager.num_blocks + 1, np.int32)
        for blocks in self.held:
            for block in blocks:
                counts[block] += 1
        assert np.array_equal(counts, self.manager.references)
        assert self.manager.in_use == int((counts > 0).sum()) <= self.manager.peak_in_use


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_block_cannot_be_released_twice() -> None:
    manager = BlockManager(3)
    blocks = manager.allocate(1)
    manager.release(blocks)
    with pytest.raises(InvariantViolation, match="nothing references it"):
        manager.release(blocks)
    with pytest.raises(InvariantViolation, match="block 0 is released"):
        manager.release([0])


def test_a_planted_leak_and_a_planted_double_free_are_found() -> None:
    manager = BlockManager(3)
    manager.allocate(1)
    manager.references[:] = 0
    with pytest.raises(InvariantViolation, match="neither free, cached nor referenced"):
        manager.check()
    manager = BlockManager(3)
    (block,) = manager.allocate(1)
    manager._free.append(block)
    with pytest.raises(InvariantViolation, match="in two states"):
        manager.check()


def test_the_least_recently_used_block_is_evicted_and_a_prefix_outlives_what_follows() -> None:
    manager = BlockManager(4)
    old, new = chain([0, 0, 0, 0]), chain([1, 1, 1, 1])
    for keys in (old, new):
        blocks = manager.allocate(2)
        for block, key in zip(blocks, keys, strict=True):
            manager.register(block, 0, key)
        manager.release(blocks)
    manager.allocate(1)
    assert len(manager.lookup(0, old)) == 1 and len(manager.lookup(0, new)) == 2
    manager.allocate(1)
    assert len(manager.lookup(0, old)) == 0 and len(manager.lookup(0, new)) == 2
    assert manager.evictions == 2


def test_a_hit_needs_equal_tokens_and_parent_not_only_an_equal_digest() -> None:
    manager = BlockManager(2)
    (block,) = manager.allocate(1)
    (key,) = chain([4, 5])
    manager.register(block, 0, key)
    assert manager.lookup(0, [key]) == [block]
    assert manager.lookup(0, [BlockKey(key.digest, key.parent, chain([4, 6])[0].tokens)]) == []
    assert manager.lookup(0, [BlockKey(key.digest, b"x" * 32, key.tokens)]) == []
    assert manager.lookup(1, [key]) == []


@given(tokens=st.lists(st.integers(0, 300), min_size=4, max_size=12), at=st.integers(0, 11))
def test_every_key_depends_on_every_token_before_it(tokens: list[int], at: int) -> None:
    at %= len(tokens) // SIZE * SIZE
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    for index, (a, b) in enumerate(zip(chain(tokens), chain(other), strict=True)):
        assert (a.digest == b.digest) == (index < at // SIZE)


def test_default_num_blocks_is_the_need_or_what_the_memory_holds() -> None:
    need = dict(max_num_seqs=4, tokens_per_sequence=100, block_size=16, bytes_per_block=1000)
    assert default_num_blocks(**need, memory_bytes=1 << 30) == 4 * 7
    assert default_num_blocks(**need, memory_bytes=20_999) == 19
    with pytest.raises(InputError, match=r"8 KV blocks of 1000 bytes .* 8000 bytes; memory for KV is 7999 bytes"):
        default_num_blocks(**need, memory_bytes=7999)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 12}, "block_size = 12 is not a multiple of 8"),
        ({"num_blocks": 0}, "num_blocks = 0; at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0; at least 1"),
        ({"max_batched_tokens": -1}, "max_batched_tokens = -1; at least 1"),
        ({"max_position": 1}, "max_position = 1"),
        ({"seed": -1}, "seed = -1 is outside"),
        ({"in_flight_updates": "maybe"}, "refuse, recompute, keep_kv is accepted"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict, message: str) -> None:
    good = dict(engine_id="e", max_num_seqs=2, max_batched_tokens=8, block_size=8, num_blocks=4, prefix_caching=True)
    with pytest.raises(InputError, match=message):
        EngineConfig(**{**good, "max_position": 32, "seed": 0, **changes})
