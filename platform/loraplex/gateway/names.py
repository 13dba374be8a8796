"""What `model=` may name, in memory: bases, adapters, versions, aliases, read from the registry by epoch.

`NameIndex` is its only writer; every resolution is made from memory after one look at the epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from loraplex.errors import UnavailableError
from loraplex_registry.wire.adapter import AdapterName, BaseName, NamesDelta

FetchDelta = Callable[[int], Awaitable[NamesDelta]]
_REFRESH_TIMEOUT_S = 2.0


class NameIndex:
    """All names that resolve.

    Args:
        fetch: All changes after an epoch.
        current_epoch: The registry's epoch now, without I/O.
    """

    def __init__(self, fetch: FetchDelta, current_epoch: Callable[[], int]) -> None:
        self._fetch = fetch
        self._current_epoch = current_epoch
        self._lock = asyncio.Lock()
        self._epoch = -1
        self._bases: dict[str, BaseName] = {}
        self._id_to_adapter: dict[str, AdapterName] = {}
        self._tenant_to_adapters: dict[str, dict[str, AdapterName]] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether names were read at least once."""
        return self._epoch >= 0

    async def ensure_fresh(self) -> None:
        """Take in every change that was acknowledged before this call.

        Raises:
            UnavailableError: The registry does not answer in time; an old name is never served instead.
        """
        if self._epoch >= self._current_epoch() and self.is_loaded:
            return
        try:
            async with asyncio.timeout(_REFRESH_TIMEOUT_S), self._lock:
                if self._epoch < self._current_epoch() or not self.is_loaded:
                    self._take(await self._fetch(max(self._epoch, 0)))
        except TimeoutError as error:
            raise UnavailableError("Names could not be read in time; try again shortly.") from error

    def find_base(self, name: str) -> BaseName | None:
        """Return the base served under exactly that name."""
        return self._bases.get(name)

    def find_fingerprint(self, name: str) -> str | None:
        """Return the registered fingerprint of a base."""
        base = self._bases.get(name)
        return None if base is None else base.fingerprint

    def find_adapter(self, tenant: str, name: str) -> AdapterName | None:
        """Return a living adapter."""
        return self._tenant_to_adapters.get(tenant, {}).get(name)

    def find_default(self, tenant: str) -> AdapterName | None:
        """Return the tenant's default adapter; before one exists, its only adapter."""
        adapters = self._tenant_to_adapters.get(tenant, {})
        default = next((adapter for adapter in adapters.values() if adapter.is_default), None)
        if default is None and len(adapters) == 1:
            return next(iter(adapters.values()))
        return default

    def bases(self) -> list[BaseName]:
        """All bases by name."""
        return sorted(self._bases.values(), key=lambda base: base.name)

    def adapters(self, tenants: Iterable[str] | None = None) -> list[AdapterName]:
        """Living adapters of `tenants` (None: of all) by tenant and name."""
        names = sorted(self._tenant_to_adapters if tenants is None else tenants)
        return [adapter for tenant in names for _, adapter in sorted(self._tenant_to_adapters.get(tenant, {}).items())]

    def _take(self, delta: NamesDelta) -> None:
        for base in delta.bases:
            self._bases[base.name] = base
        for adapter in delta.adapters:
            self._replace(adapter)
        self._epoch = delta.epoch

    def _replace(self, adapter: AdapterName) -> None:
        known = self._id_to_adapter.pop(adapter.adapter_id, None)
        if known is not None:
            of_tenant = self._tenant_to_adapters[known.tenant]
            if of_tenant.get(known.name) is known:
                del of_tenant[known.name]
        if not adapter.deleted:
            self._id_to_adapter[adapter.adapter_id] = adapter
            self._tenant_to_adapters.setdefault(adapter.tenant, {})[adapter.name] = adapter
