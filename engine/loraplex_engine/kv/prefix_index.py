"""Which computed blocks hold which tokens after which prefix.

`PrefixIndex` is written by `BlockPool` alone; it knows block ids, tokens and chain hashes, no tensors, no requests. A
chain hash stands for all tokens up to the end of a block, for the tenant and for the adapter that they went through.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

_MAX_SIBLINGS = 16
"""Blocks after one prefix that `find_tail` looks at, the latest ones; thousands may follow a common instruction."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """A block's tokens: `token_ids` after the prefix `parent`. `chain` is their chain hash, None unless it is full."""

    parent: bytes
    token_ids: Sequence[int]
    chain: bytes | None = None


class PrefixIndex:
    """Computed blocks by the chain hash of all their tokens, and by the prefix that they follow."""

    def __init__(self) -> None:
        self._chain_to_block: dict[bytes, int] = {}
        self._block_to_content: dict[int, BlockContent] = {}
        self._parent_to_blocks: dict[bytes, dict[int, None]] = {}

    def find_chain(self, chains: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `chains`, one per full block."""
        block_ids: list[int] = []
        for chain in chains:
            block_id = self._chain_to_block.get(chain)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def find_tail(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int]:
        """The block after `parent` that begins with most of `token_ids`, and with how many; (-1, 0) if none does."""
        best, best_len = -1, 0
        for block_id in islice(reversed(self._parent_to_blocks.get(parent, {})), _MAX_SIBLINGS):
            length = common_len(self._block_to_content[block_id].token_ids, token_ids)
            if length > best_len:
                best, best_len = block_id, length
        return best, best_len

    def enter(self, block_id: int, content: BlockContent) -> None:
        """Let a block be found by this, and nothing else; nothing changes where these tokens are found already."""
        if self._is_known(content):
            return
        self.forget(block_id)
        self._block_to_content[block_id] = content
        self._parent_to_blocks.setdefault(content.parent, {})[block_id] = None
        if content.chain is not None:
            self._chain_to_block[content.chain] = block_id

    def forget(self, block_id: int) -> None:
        """Let a block not be found any more."""
        content = self._block_to_content.pop(block_id, None)
        if content is None:
            return
        if content.chain is not None:
            del self._chain_to_block[content.chain]
        siblings = self._parent_to_blocks[content.parent]
        del siblings[block_id]
        if not siblings:
            del self._parent_to_blocks[content.parent]

    def _is_known(self, content: BlockContent) -> bool:
        if content.chain is not None:
            return content.chain in self._chain_to_block
        return self.find_tail(content.parent, content.token_ids)[1] == len(content.token_ids)

    def check_integrity(self) -> None:
        """Assert that both ways to a block agree with what it holds."""
        contents = self._block_to_content
        assert self._chain_to_block == {c.chain: i for i, c in contents.items() if c.chain is not None}
        found = {(parent, i) for parent, ids in self._parent_to_blocks.items() for i in ids}
        assert found == {(content.parent, i) for i, content in contents.items()}
        assert all(self._parent_to_blocks.values())


def common_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def prefix_seed(tenant_id: str, cache_salt: str = "") -> bytes:
    """Start of a request's chain: no prefix is shared across tenants, nor across the salts of one."""
    seed = hashlib.blake2b(tenant_id.encode(), digest_size=16).digest()
    if not cache_salt:
        return seed
    # `person`: whoever chooses salts must not make one that stands for the tokens of a block
    return hashlib.blake2b(cache_salt.encode(), key=seed, person=b"salt", digest_size=16).digest()


def enter_adapter(previous: bytes, digest: str, adapter_start: int) -> bytes:
    """Turn a chain of base blocks into an adapter's, which no other version shares, nor one that began elsewhere."""
    return hashlib.blake2b(f"{digest}\0{adapter_start}".encode(), key=previous, digest_size=16).digest()


def chain_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block given the hash of everything before it."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=previous, digest_size=16).digest()
