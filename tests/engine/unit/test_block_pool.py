from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples import examples
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.kv.prefix_index import BlockContent, chain_hash, enter_adapter, prefix_seed


def test_allocate_takes_the_oldest_free_blocks_and_free_returns_the_tail_first() -> None:
    pool = BlockPool(6, 4)
    first, second = pool.try_allocate(2), pool.try_allocate(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    pool.free(second)
    pool.free(first)
    assert pool.try_allocate(6) == [5, 4, 3, 2, 1, 0]


def test_allocate_changes_nothing_when_blocks_do_not_suffice() -> None:
    pool = BlockPool(2, 4)
    assert pool.try_allocate(3) is None
    assert pool.num_free == 2


def test_freed_block_is_found_by_its_content_until_it_is_reused() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.try_allocate(1) or []
    pool.publish(block, BlockContent(b"", [1, 2, 3, 4], b"content"))
    pool.free([block])
    assert pool.find_prefix([b"content"]) == [block]
    pool.try_allocate(2)
    assert pool.find_prefix([b"content"]) == []


def test_shared_block_outlives_its_first_owner() -> None:
    pool = BlockPool(1, 4)
    blocks = pool.try_allocate(1) or []
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 0
    pool.free(blocks)
    assert pool.num_free == 1


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_tiny_pools_answer_with_a_shortage(num_blocks: int) -> None:
    pool = BlockPool(num_blocks, 16)
    assert pool.try_allocate(num_blocks + 1) is None
    assert pool.try_allocate(0) == []


def test_prefixes_of_other_adapters_tenants_and_salts_differ() -> None:
    seeds = [prefix_seed(tenant, salt) for tenant in ("x", "y") for salt in ("", "s", "t")]
    seeds += [enter_adapter(seed, digest, start) for seed in seeds for digest in ("a", "b") for start in (0, 4)]
    assert len({chain_hash(seed, [1, 2, 3]) for seed in seeds}) == 30


def test_salt_cannot_stand_for_tokens() -> None:
    tokens = [65] * 16
    assert chain_hash(prefix_seed("x"), tokens) != prefix_seed("x", array("q", tokens).tobytes().decode())


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, 4)
        self.held: list[list[int]] = []
        self.num_published = 0

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.try_allocate(count)
        assert (blocks is None) == (count > free)
        if blocks:
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), content=st.integers(0, 5))
    def publish(self, data: st.DataObject, content: int) -> None:
        tokens = [content] * 4
        self.pool.publish(data.draw(st.sampled_from(self.held))[0], BlockContent(b"", tokens, bytes([content])))

    @rule(content=st.integers(0, 5))
    def revive(self, content: int) -> None:
        blocks = self.pool.find_prefix([bytes([content])])
        if blocks:
            self.pool.share(blocks)
            self.held.append(blocks)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == 8 - len({block for blocks in self.held for block in blocks})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(20), stateful_step_count=40, deadline=None)
