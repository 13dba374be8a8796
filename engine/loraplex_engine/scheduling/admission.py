"""Which waiting requests can start now. `Admission` looks and decides; the scheduler moves the requests.

A request that waits for its adapter or for a prefix in flight is passed over, never in the way. The first one that
lacks blocks holds back all behind it: smaller ones that slip past would keep it waiting for ever. Where seats or blocks
are taken, a tenant above its share may have to make way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from loraplex_engine.core.request import Request
from loraplex_engine.errors import InvocationMissingError, RequestError
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.lora.residency import Residency
from loraplex_engine.scheduling.limits import Limits
from loraplex_engine.scheduling.policy import FairShare
from loraplex_engine.scheduling.prefixes import Prefix, Prefixes
from loraplex_engine.scheduling.turns import Turns

_WATERMARK = 0.01
"""Share of the pool that stays free when a request starts beside others, for those to grow."""


class Admission:
    """The way from waiting to running.

    Args:
        refuse: ends a waiting request that can never start.
        make_way: takes the place of a running request for a waiting one that could start, or needs so many blocks;
            False if nobody has to yield.
        share: how tenants share the engine.
    """

    def __init__(
        self,
        pool: BlockPool,
        residency: Residency,
        prefixes: Prefixes,
        limits: Limits,
        clock: Callable[[], float],
        refuse: Callable[[Request, RequestError], None],
        make_way: Callable[[Request, int], bool],
        share: FairShare,
    ) -> None:
        self.turns = Turns(residency, clock, share)
        self._pool = pool
        self._residency = residency
        self._prefixes = prefixes
        self._limits = limits
        self._clock = clock
        self._refuse = refuse
        self._make_way = make_way
        self._share = share
        self._watermark = int(pool.num_blocks * _WATERMARK)

    def line_up(self, waiting: Collection[Request]) -> list[Request]:
        """Waiting requests in the order of policy; their adapters are loaded and given slots in that order."""
        line = self._share.arrange(list(waiting))
        self._residency.want([request.digest for request in line if request.digest is not None])
        self.turns.plan(line)
        return line

    def find_startable(self, line: Iterable[Request], running: Collection[Request]) -> Iterator[tuple[Request, Prefix]]:
        """Requests of a line that can start beside those that run, with the prefix that each can start from.

        NOTE: lazy, and looks at the pool anew for each: let one start before the next is asked for.
        """
        for request in line:
            is_full = len(running) >= self._limits.max_num_seqs
            if is_full and self._share.find_yielding(request, running, self._limits.max_num_seqs) is None:
                continue
            if request.is_lone or not self._has_adapter(request):
                continue
            prefix = self._prefixes.try_find(request)
            if prefix is None or (is_full and not self._make_way(request, 0)):
                continue
            fitting = self._fit(request, prefix, running)
            while fitting is None and self._make_way(request, self._pool.blocks_for(request.num_tokens)):
                # what was found may lie in blocks that are free now
                prefix = self._prefixes.try_find(request) or Prefix()
                fitting = self._fit(request, prefix, running)
            if fitting is None:
                return
            yield request, fitting

    def can_start_alone(self, request: Request, running: Collection[Request]) -> bool:
        """Whether a request that must be alone in its step can have it now."""
        return self._fit(request, Prefix(), running) is not None and self._has_adapter(request)

    def _fit(self, request: Request, prefix: Prefix, running: Collection[Request]) -> Prefix | None:
        """The prefix, or less of it, with which all tokens of the request have room beside the running ones."""
        blocks_for = self._pool.blocks_for
        num_promised = sum(max(0, blocks_for(r.num_tokens) - len(r.block_ids)) for r in running)
        num_spare = self._pool.num_free - num_promised - (self._watermark if running else 0)
        for start in (prefix, prefix.without_tail()):
            if self._prefixes.num_needed(request, start) <= num_spare:
                return start
        return None

    def _has_adapter(self, request: Request) -> bool:
        """Whether the request's adapter is in a slot, and where in the prompt it begins to act."""
        if request.digest is None:
            return True
        now, num_binds = self._clock(), self._residency.num_binds
        is_ready = self.turns.try_start(request)
        if self._residency.num_binds > num_binds:
            num_bytes = self._residency.facts(request.digest).num_bytes
            request.load_bytes += num_bytes
            self._share.note_load(request, num_bytes)
        if not is_ready:
            request.load_wait_at = now if request.load_wait_at is None else request.load_wait_at
            return False
        if request.load_wait_at is not None:
            request.load_s += now - request.load_wait_at
            request.load_wait_at = None
        invocation_ids = self._residency.facts(request.digest).invocation_ids
        start = find_last(request.prompt_ids, invocation_ids)
        if start is None:
            self._refuse(request, InvocationMissingError.of(invocation_ids))
            return False
        request.adapter_start = start
        return True


def find_last(token_ids: list[int], wanted: Sequence[int]) -> int | None:
    """Position of the last occurrence of `wanted` in `token_ids`, 0 for nothing wanted, None if there is none."""
    if not wanted:
        return 0
    pattern = list(wanted)
    for start in range(len(token_ids) - len(pattern), -1, -1):
        if token_ids[start] == pattern[0] and token_ids[start : start + len(pattern)] == pattern:
            return start
    return None
