"""What a prefix cache that never forgets would have found: the share of prompt tokens that repeat an earlier prefix.

`PrefixHistory` alone writes its counts. It knows chain hashes (`prefix_index`) by tenant, whether or not their blocks
are still there or were ever shared; no tokens, no requests.

Memory is bounded: as long as all hashes fit, the counts are exact. Then whoever holds most forgets what it asked for
longest ago, the ends of prefixes before their beginnings; such a prefix counts as new when it comes again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_HASHES = 1 << 17
"""Of all tenants, some 20 MB: two million tokens of different prefixes in blocks of 16."""
_MAX_TENANTS = 1024
_FORGOTTEN_AT_ONCE = 64


@dataclass(slots=True)
class PrefixCount:
    """Requests, their prompt tokens, and those of them that lie in whole blocks of a prefix that was there before."""

    requests: int = 0
    prompt_tokens: int = 0
    repeated_tokens: int = 0

    def add(self, prompt_tokens: int, repeated_tokens: int) -> None:
        """Count one more request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.repeated_tokens += repeated_tokens


@dataclass(slots=True)
class _Tenant:
    count: PrefixCount = field(default_factory=PrefixCount)
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Hashes, those that were asked for longest ago first."""


class PrefixHistory:
    """Counts repeated prefix tokens, in all and by tenant; of tenants those that asked last are kept apart."""

    def __init__(self, block_size: int, max_hashes: int = MAX_HASHES) -> None:
        self.total = PrefixCount()
        self.num_hashes = 0
        """That are remembered."""
        self.num_forgotten = 0
        """Hashes that there was no room for; 0: the counts are exact."""
        self._block_size = block_size
        self._max_hashes = max_hashes
        self._id_to_tenant: OrderedDict[str, _Tenant] = OrderedDict()

    def note_prompt(self, tenant_id: str, chains: Sequence[bytes], num_tokens: int) -> None:
        """Count a prompt, and remember it.

        Args:
            tenant_id: Whose it is.
            chains: Chain hashes of its whole blocks that a cache could give: the last token is always computed.
            num_tokens: Its length.
        """
        tenant = self._find_tenant(tenant_id)
        num_known = 0
        for chain in chains:
            if chain not in tenant.seen:
                break
            num_known += 1
        repeated = num_known * self._block_size
        self.total.add(num_tokens, repeated)
        tenant.count.add(num_tokens, repeated)
        self._remember(tenant, chains)

    def note_answer(self, tenant_id: str, chains: Sequence[bytes]) -> None:
        """Remember all whole blocks of a request that has ended: a later prompt may go on from its answer."""
        self._remember(self._find_tenant(tenant_id), chains)

    def describe(self, max_tenants: int) -> dict[str, PrefixCount]:
        """Counts by tenant id, of those with most prompt tokens."""
        found = sorted(self._id_to_tenant.items(), key=lambda item: -item[1].count.prompt_tokens)
        return {tenant_id: tenant.count for tenant_id, tenant in found[:max_tenants]}

    def check_integrity(self) -> None:
        """Assert that what is remembered is counted, and bounded."""
        assert self.num_hashes == sum(len(tenant.seen) for tenant in self._id_to_tenant.values())
        assert self.num_hashes <= self._max_hashes
        assert len(self._id_to_tenant) <= _MAX_TENANTS

    def _find_tenant(self, tenant_id: str) -> _Tenant:
        tenant = self._id_to_tenant.get(tenant_id)
        if tenant is None:
            tenant = self._id_to_tenant[tenant_id] = _Tenant()
            if len(self._id_to_tenant) > _MAX_TENANTS:
                _, gone = self._id_to_tenant.popitem(last=False)
                self._note_forgotten(len(gone.seen))
        else:
            self._id_to_tenant.move_to_end(tenant_id)
        return tenant

    def _remember(self, tenant: _Tenant, chains: Sequence[bytes]) -> None:
        seen, before = tenant.seen, len(tenant.seen)
        # the beginning last, so that it is the last to be forgotten
        for chain in reversed(chains):
            if chain in seen:
                seen.move_to_end(chain)
            else:
                seen[chain] = None
        self.num_hashes += len(seen) - before
        while self.num_hashes > self._max_hashes:
            self._forget()

    def _forget(self) -> None:
        largest = max(self._id_to_tenant.values(), key=lambda tenant: len(tenant.seen)).seen
        count = min(len(largest), _FORGOTTEN_AT_ONCE)
        for _ in range(count):
            largest.popitem(last=False)
        self._note_forgotten(count)

    def _note_forgotten(self, count: int) -> None:
        self.num_hashes -= count
        self.num_forgotten += count
