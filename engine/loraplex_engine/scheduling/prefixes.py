"""Prefixes that requests have in common: what one starts from, what it waits for, what it leaves to others.

`Prefixes` knows chains of tokens and who computes them; it holds blocks for a request, and never frees them.

1. Full blocks that are known are shared, held by every request that reads them.
2. Of a block that begins with the request's next tokens and goes on differently, or ends, it takes a copy, made at the
   start of the step in which it writes there for the first time.
3. A request whose next full block is being computed by a running one waits for it, 5 s at most, and then starts from
   all that has become known. The running one never waits, so somebody always computes.

At least one token is left to compute, for its logits; a request whose prompt is scored computes all of it, and others
start from that. A block is known to others only after finite numbers of its last token or a later one: attention reads
the positions before, so a NaN among them would have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from loraplex_engine.core.request import Request
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.kv.prefix_history import PrefixHistory
from loraplex_engine.kv.prefix_index import BlockContent, chain_hash, enter_adapter, prefix_seed

_MAX_WAIT_S = 5.0
_MIN_TAIL_SHARE = 0.25
"""Of a block: copying costs about as much as computing so many tokens."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where a request can start: after whole blocks to share, and the first `tail_len` tokens of one to copy."""

    block_ids: list[int] = field(default_factory=list)
    tail_id: int = -1
    tail_len: int = 0

    def without_tail(self) -> Prefix:
        """The whole blocks alone."""
        return Prefix(self.block_ids)


class Prefixes:
    """Shared prefixes of one pool; `is_enabled` False: nobody shares anything."""

    def __init__(self, pool: BlockPool, clock: Callable[[], float], *, is_enabled: bool) -> None:
        self._pool = pool
        self._clock = clock
        self.is_enabled = is_enabled
        self._min_tail = max(1, int(pool.block_size * _MIN_TAIL_SHARE))
        self.history = PrefixHistory(pool.block_size)
        """What could be shared, also where nothing is."""
        self._chain_to_owner: dict[bytes, Request] = {}
        self.num_queries = 0
        self.num_hits = 0
        self.num_waits = 0

    def try_find(self, request: Request) -> Prefix | None:
        """Longest known prefix of a waiting request; None while another request computes what comes next.

        Valid until the next change of the pool.
        """
        if not self._shares(request):
            return Prefix()
        if self.is_awaiting(request):
            return None
        size, reach = self._pool.block_size, _reach(request)
        self._extend_chain(request, (request.num_tokens - 1) // size)
        num_full = reach // size
        block_ids = self._pool.find_prefix(request.block_hashes[:num_full])
        start = len(block_ids)
        if start < num_full and self._begin_to_wait(request, start):
            return None
        wanted = request.token_ids(start * size, min((start + 1) * size, reach))
        tail_id, tail_len = self._pool.find_tail(self._parent(request, start), wanted)
        return Prefix(block_ids, tail_id, tail_len) if tail_len >= self._min_tail else Prefix(block_ids)

    def is_awaiting(self, request: Request) -> bool:
        """Whether another request still computes a block of the prefix that this one waited for last."""
        if request.awaited is None or self._clock() - request.prefix_wait_at >= _MAX_WAIT_S:
            return False
        # block after block, so that a thousand requests that wait need not look for their prefix after each chunk of it
        num_full = _reach(request) // self._pool.block_size
        while request.awaited < num_full and request.block_hashes[request.awaited] not in self._chain_to_owner:
            request.awaited += 1
        return request.awaited < num_full

    def num_tokens(self, prefix: Prefix) -> int:
        """Tokens that a request need not compute."""
        return len(prefix.block_ids) * self._pool.block_size + prefix.tail_len

    def num_needed(self, request: Request, prefix: Prefix) -> int:
        """Blocks that `take` and the computing of all other tokens take out of the free ones."""
        num_own = self._pool.blocks_for(request.num_tokens) - len(prefix.block_ids)
        tail_ids = [prefix.tail_id] if prefix.tail_len else []
        return num_own + self._pool.count_free([*prefix.block_ids, *tail_ids])

    def take(self, request: Request, prefix: Prefix) -> tuple[int, int] | None:
        """Let an admitted request start from a prefix that fits.

        Returns:
            Blocks (from, to) to copy before the next step, of which the first is held until it has been copied.
        """
        self._note_prompt(request)
        if not self._shares(request):
            return None
        self._pool.share(prefix.block_ids)
        request.block_ids = list(prefix.block_ids)
        request.num_published = len(prefix.block_ids)
        request.num_computed = len(prefix.block_ids) * self._pool.block_size
        copy = self._take_tail(request, prefix) if prefix.tail_len else None
        request.num_finite = request.num_computed
        for chain in request.block_hashes[request.num_published :]:
            self._chain_to_owner.setdefault(chain, request)
        if request.preemptions == 0 and not request.is_scoring:
            request.num_cached = request.num_computed
            self.num_queries += len(request.prompt_ids)
            self.num_hits += request.num_cached
        return copy

    def publish(self, request: Request) -> None:
        """Let others find the blocks that have become full, as far as finite numbers vouch for them."""
        num_full = request.num_finite // self._pool.block_size
        if num_full <= request.num_published or not self._shares(request):
            return
        self._extend_chain(request, num_full)
        for index in range(request.num_published, num_full):
            chain = request.block_hashes[index]
            self._publish_block(request, index, chain)
            if self._chain_to_owner.get(chain) is request:
                del self._chain_to_owner[chain]
        request.num_published = num_full

    def publish_tail(self, request: Request) -> None:
        """Let others find the last block too, which is not full: where the prompt ends, or where the request does."""
        if request.num_finite % self._pool.block_size and self._shares(request):
            self.publish(request)
            self._publish_block(request, request.num_finite // self._pool.block_size, None)

    def note_answer(self, request: Request) -> None:
        """Remember what a request that has ended well leaves behind for prompts that go on from its answer."""
        num_blocks = (request.num_tokens - 1) // self._pool.block_size
        if num_blocks > (len(request.prompt_ids) - 1) // self._pool.block_size and _counts(request):
            self._extend_chain(request, num_blocks)
            self.history.note_answer(request.tenant_id, request.block_hashes[:num_blocks])

    def leave(self, request: Request) -> None:
        """The request computes no more; whoever waited for it need not."""
        for chain in request.block_hashes[request.num_published :]:
            if self._chain_to_owner.get(chain) is request:
                del self._chain_to_owner[chain]
        request.num_published = request.num_finite = 0

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Assert that only running requests are waited for, and only for what they have not given yet."""
        self.history.check_integrity()
        promised = {r: set(r.block_hashes[r.num_published :]) for r in running}
        assert all(chain in promised[owner] for chain, owner in self._chain_to_owner.items())

    def _note_prompt(self, request: Request) -> None:
        """Count a prompt when it starts for the first time."""
        if request.preemptions or request.is_scoring or not _counts(request):
            return
        num_tokens = len(request.prompt_ids)
        num_blocks = (num_tokens - 1) // self._pool.block_size
        self._extend_chain(request, num_blocks)
        self.history.note_prompt(request.tenant_id, request.block_hashes[:num_blocks], num_tokens)

    def _shares(self, request: Request) -> bool:
        return self.is_enabled and _counts(request)

    def _begin_to_wait(self, request: Request, index: int) -> bool:
        """Wait for a block if somebody computes it; False if nobody does, or the request has waited long enough."""
        if request.block_hashes[index] not in self._chain_to_owner:
            return False
        if request.awaited is None:
            request.prefix_wait_at = self._clock()
            self.num_waits += 1
        request.awaited = index
        return self.is_awaiting(request)

    def _take_tail(self, request: Request, prefix: Prefix) -> tuple[int, int]:
        # NOTE: held before a block is allocated, which could be that very block
        self._pool.share([prefix.tail_id])
        block_ids = self._pool.try_allocate(1)
        assert block_ids is not None
        request.block_ids += block_ids
        request.num_computed += prefix.tail_len
        return prefix.tail_id, block_ids[0]

    def _publish_block(self, request: Request, index: int, chain: bytes | None) -> None:
        size = self._pool.block_size
        token_ids = request.token_ids(index * size, min((index + 1) * size, request.num_finite))
        self._pool.publish(request.block_ids[index], BlockContent(self._parent(request, index), token_ids, chain))

    def _parent(self, request: Request, index: int) -> bytes:
        """Chain hash before a block; blocks that end before the adapter acts are the base's."""
        previous = request.block_hashes[index - 1] if index else prefix_seed(request.tenant_id, request.cache_salt)
        if request.digest is not None and index == request.adapter_start // self._pool.block_size:
            return enter_adapter(previous, request.digest, request.adapter_start)
        return previous

    def _extend_chain(self, request: Request, num_blocks: int) -> None:
        size = self._pool.block_size
        for index in range(len(request.block_hashes), num_blocks):
            token_ids = request.token_ids(index * size, (index + 1) * size)
            request.block_hashes.append(chain_hash(self._parent(request, index), token_ids))


def _counts(request: Request) -> bool:
    """Whether it is a tenant's request, not one by which the engine looks into an adapter."""
    return not (request.is_lone or request.wants_logits)


def _reach(request: Request) -> int:
    """Tokens that a request may take from others: the last one is not among them, nor one whose logits it needs."""
    return min(request.num_tokens - 1, request.num_scored) if request.is_scoring else request.num_tokens - 1
