"""Blocks of the KV cache.

`BlockPool` is the only writer of reference counts and of the prefix index; it knows block ids and content hashes, never
tensors or requests.

A block is held (count above 0) or free. Free blocks form one queue, oldest first; a free block keeps its content hash,
and can be taken back by a request with the same prefix until the queue reaches it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Fixed number of KV blocks with reference counts, LRU reuse and a prefix index."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._hash_to_block: dict[bytes, int] = {}

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

    def try_allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, oldest free ones first; None, and nothing changed, when there are fewer."""
        if count > len(self._free):
            return None
        return [self._take_oldest() for _ in range(count)]

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `hashes`; changes nothing, valid until the next change of the pool."""
        block_ids: list[int] = []
        for content_hash in hashes:
            block_id = self._hash_to_block.get(content_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that `find_prefix` returned once more."""
        for block_id in block_ids:
            if self._counts[block_id] == 0:
                del self._free[block_id]
            self._counts[block_id] += 1

    def publish(self, block_id: int, content_hash: bytes) -> None:
        """Enter a full, computed block into the prefix index; the first block of a content stays the one found."""
        assert self._counts[block_id] > 0
        if content_hash not in self._hash_to_block and self._hash_of[block_id] is None:
            self._hash_to_block[content_hash] = block_id
            self._hash_of[block_id] = content_hash

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
            self._forget(block_id)
        return list(self._free)

    def check_integrity(self) -> None:
        """Assert that held and free blocks add up and that the prefix index is one to one."""
        held = {block_id for block_id, count in enumerate(self._counts) if count > 0}
        assert all(count >= 0 for count in self._counts)
        assert held.isdisjoint(self._free)
        assert len(held) + len(self._free) == self.num_blocks
        indexed = {block_id: content_hash for content_hash, block_id in self._hash_to_block.items()}
        assert len(indexed) == len(self._hash_to_block)
        assert indexed == {i: h for i, h in enumerate(self._hash_of) if h is not None}

    def _take_oldest(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        self._counts[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        known_hash = self._hash_of[block_id]
        if known_hash is not None:
            del self._hash_to_block[known_hash]
            self._hash_of[block_id] = None


def prefix_seed(tenant_id: str) -> bytes:
    """Start of a request's hash chain: no prefix is shared across tenants."""
    return hashlib.blake2b(tenant_id.encode(), digest_size=16).digest()


def enter_adapter(previous: bytes, digest: str, adapter_start: int) -> bytes:
    """Turn a chain of base blocks into an adapter's, which no other version shares, nor one that began elsewhere."""
    return hashlib.blake2b(f"{digest}\0{adapter_start}".encode(), key=previous, digest_size=16).digest()


def chain_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block given the hash of everything before it."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=previous, digest_size=16).digest()
