"""Blocks of the KV cache.

`BlockPool` is the only writer of reference counts and of the prefix index; it knows block ids and what they hold, never
tensors or requests.

A block is held (count above 0) or free. Free blocks form one queue, oldest first; a free block keeps its content, and
can be taken back by a request with the same prefix until the queue reaches it. Blocks are freed tail first, so the
blocks that most requests have in common are the last to go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loraplex_engine.kv.prefix_index import BlockContent, PrefixIndex


class BlockPool:
    """Fixed number of KV blocks with reference counts, LRU reuse and a prefix index."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that `try_allocate` could give now."""
        return len(self._free)

    @property
    def usage_ratio(self) -> float:
        """Held blocks over all blocks."""
        return 1.0 - len(self._free) / self.num_blocks if self.num_blocks else 1.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(self._counts[block_id] == 0 for block_id in block_ids)

    def try_allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, oldest free ones first; None, and nothing changed, when there are fewer."""
        if count > len(self._free):
            return None
        return [self._take_oldest() for _ in range(count)]

    def find_prefix(self, chains: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `chains`; changes nothing, valid until the next change of the pool."""
        return self._index.find_chain(chains)

    def find_tail(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int]:
        """The block after `parent` that begins with most of `token_ids`, and with how many; (-1, 0) if there is none.

        Changes nothing, valid until the next change of the pool. The rest of the block belongs to somebody else:
        who goes on from there does so in a copy.
        """
        return self._index.find_tail(parent, token_ids)

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that `find_prefix` or `find_tail` returned once more."""
        for block_id in block_ids:
            if self._counts[block_id] == 0:
                del self._free[block_id]
            self._counts[block_id] += 1

    def publish(self, block_id: int, content: BlockContent) -> None:
        """Let a computed block be found by what it holds; of equal full blocks the first stays the one found.

        Tokens may be added later to a block that was published before it was full, never changed.
        """
        assert self._counts[block_id] > 0
        self._index.enter(block_id, content)

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each block; the last block of a request becomes reusable first."""
        for block_id in reversed(block_ids):
            assert self._counts[block_id] > 0
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                self._free[block_id] = None

    def forget_free(self) -> list[int]:
        """Forget the prefixes that free blocks keep; returns those blocks, whose content is now nobody's."""
        for block_id in self._free:
            self._index.forget(block_id)
        return list(self._free)

    def check_integrity(self) -> None:
        """Assert that held and free blocks add up and that the prefix index agrees with itself."""
        held = {block_id for block_id, count in enumerate(self._counts) if count > 0}
        assert all(count >= 0 for count in self._counts)
        assert held.isdisjoint(self._free)
        assert len(held) + len(self._free) == self.num_blocks
        self._index.check_integrity()

    def check_holds(self, counts: dict[int, int]) -> None:
        """Assert that every block is held as often as its holders say, by block id, and the others by nobody."""
        assert {block_id: count for block_id, count in enumerate(self._counts) if count} == counts

    def _take_oldest(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._index.forget(block_id)
        self._counts[block_id] = 1
        return block_id
