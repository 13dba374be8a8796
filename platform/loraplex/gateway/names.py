"""What `model=` may name, in memory: bases, adapters, versions, aliases, read from the registry by epoch.

Adapters belong to a tenant's id: its name may pass to another tenant, and nothing of the former one passes with it.

`NameIndex` is its only writer; every resolution is made from memory after one look at the epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

from loraplex.errors import UnavailableError
from loraplex_registry.wire.adapter import AdapterName, BaseName, NamesDelta

FetchDelta = Callable[[int], Awaitable[NamesDelta]]
LIVE = "live"
_REFRESH_TIMEOUT_S = 2.0
"""For a request that waits for it."""
_FIRST_TIMEOUT_S = 30.0
"""For a gateway that starts: it reads everything, and nobody waits but whoever started it."""
_CALLABLE = ("validating", "ready", "quarantined")


class NameIndex:
    """All names that resolve.

    Args:
        fetch: All changes after an epoch.
        current_epoch: The registry's epoch now, without I/O.
        find_tenant_id: The id of the living tenant of a name, None if there is none; without I/O.
    """

    def __init__(
        self, fetch: FetchDelta, current_epoch: Callable[[], int], find_tenant_id: Callable[[str], str | None]
    ) -> None:
        self._fetch = fetch
        self._current_epoch = current_epoch
        self._find_tenant_id = find_tenant_id
        self._lock = asyncio.Lock()
        self._epoch = -1
        self._bases: dict[str, BaseName] = {}
        self._id_to_adapter: dict[str, AdapterName] = {}
        self._tenant_id_to_adapters: dict[str, dict[str, AdapterName]] = {}
        self._contents: tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]] = (frozenset(), frozenset())
        self._contents_epoch = -1

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
            async with asyncio.timeout(_REFRESH_TIMEOUT_S if self.is_loaded else _FIRST_TIMEOUT_S), self._lock:
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

    def has_tenant(self, tenant: str) -> bool:
        """Whether there is a living tenant of that name."""
        return self._find_tenant_id(tenant) is not None

    def find_adapter(self, tenant: str, name: str) -> AdapterName | None:
        """Return a living adapter of a living tenant."""
        return self._adapters_of(tenant).get(name)

    def find_adapter_by_id(self, adapter_id: str) -> AdapterName | None:
        """Return a living adapter, whatever its tenant."""
        return self._id_to_adapter.get(adapter_id)

    def find_default(self, tenant: str) -> AdapterName | None:
        """Return the tenant's default adapter; before one was live, its only adapter, which can say why it is not.

        An adapter that is live and not the default stands beside a default that was deleted; it is no substitute.
        """
        adapters = self._adapters_of(tenant).values()
        default = next((adapter for adapter in adapters if adapter.is_default), None)
        if default is None and len(adapters) == 1:
            return next((adapter for adapter in adapters if LIVE not in adapter.aliases), None)
        return default

    def has_served(self, base: str, digest: str) -> bool:
        """Whether a version of that content is ready, or is about to be, whoever's it is."""
        return self._has_version(base, digest, ("validating", "ready"))

    def has_callable(self, base: str, digest: str) -> bool:
        """Whether a version of that content is called, or may be without an upload, whoever's it is."""
        return self._has_version(base, digest, _CALLABLE)

    def has_retired(self, base: str, digest: str) -> bool:
        """Whether a living adapter has that content as a version that may be restored."""
        return self._has_version(base, digest, ("retired",))

    def list_contents(self) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]:
        """All content by base and digest: what is callable (see `has_callable`), and what living adapters retired."""
        if self._contents_epoch != self._epoch:
            found = [
                (version.state, (adapter.base, version.digest))
                for adapter in self._id_to_adapter.values()
                for version in adapter.versions
            ]
            is_callable = frozenset(pair for state, pair in found if state in _CALLABLE)
            self._contents = is_callable, frozenset(pair for state, pair in found if state == "retired")
            self._contents_epoch = self._epoch
        return self._contents

    def find_registered(self, pool: str) -> frozenset[str]:
        """Return the digests of the full fine-tunes that a pool is to serve, nothing if it is free."""
        return frozenset(
            version.digest
            for adapter in self._id_to_adapter.values()
            for version in adapter.versions
            if version.pool == pool and version.state in ("ready", "quarantined")
        )

    def bases(self) -> list[BaseName]:
        """All bases by name."""
        return sorted(self._bases.values(), key=lambda base: base.name)

    def adapters(self, tenants: Iterable[str] | None = None) -> list[AdapterName]:
        """Living adapters of `tenants` (None: of all) by tenant and name."""
        names = {adapter.tenant for adapter in self._id_to_adapter.values()} if tenants is None else tenants
        return [adapter for tenant in sorted(names) for _, adapter in sorted(self._adapters_of(tenant).items())]

    def _has_version(self, base: str, digest: str, states: Collection[str]) -> bool:
        return any(
            version.digest == digest and version.state in states
            for adapter in self._id_to_adapter.values()
            if adapter.base == base
            for version in adapter.versions
        )

    def _adapters_of(self, tenant: str) -> dict[str, AdapterName]:
        tenant_id = self._find_tenant_id(tenant)
        return {} if tenant_id is None else self._tenant_id_to_adapters.get(tenant_id, {})

    def _take(self, delta: NamesDelta) -> None:
        for base in delta.bases:
            self._bases[base.name] = base
        for adapter in delta.adapters:
            self._replace(adapter)
        self._epoch = delta.epoch

    def _replace(self, adapter: AdapterName) -> None:
        known = self._id_to_adapter.pop(adapter.adapter_id, None)
        if known is not None:
            of_tenant = self._tenant_id_to_adapters[known.tenant_id]
            if of_tenant.get(known.name) is known:
                del of_tenant[known.name]
        if not adapter.deleted:
            self._id_to_adapter[adapter.adapter_id] = adapter
            self._tenant_id_to_adapters.setdefault(adapter.tenant_id, {})[adapter.name] = adapter
