"""The management API, one method per route. Each returns the API's object and raises `ClientError` where it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from loraplex.client.adapter_name import DEFAULT_NAME, AdapterRef
from loraplex.client.connection import Connection, check_response, decode, lost
from loraplex.client.errors import ClientError, ConnectionFailedError
from loraplex.client.types import (
    Adapter,
    Alias,
    AliasChange,
    Base,
    Event,
    Finding,
    FleetReport,
    Key,
    Model,
    MovedAlias,
    Outcomes,
    Reconciliation,
    Replica,
    Tenant,
    WarmReplica,
    Warmth,
)
from loraplex.client.upload import OPTIONAL_FILES, REQUIRED_FILES, CountingFile, Progress, Upload
from loraplex.wire.stats import Stats
from loraplex_registry.wire.adapter import Target, VersionView

LIVE = "live"
LOST_REDIS = "does not answer: each gateway counts limits alone and asks the database for changes"
"""What it means that a gateway misses its Redis."""
_COUNTS_ALONE = re.compile(r"^loraplex_limits_degraded 1(\.0)?$", re.MULTILINE)


class Management:
    """Everything that the command line does through `/api/v1`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def list_bases(self) -> list[Base]:
        """Return all bases."""
        return self.connection.list("/api/v1/bases", Base)

    def list_models(self) -> list[Model]:
        """Return the names that this key may call."""
        return self.connection.list("/v1/models", Model)

    def list_fleet(self) -> list[Replica]:
        """Return the engines; for platform keys only."""
        return self.connection.list("/api/v1/fleet", Replica)

    def show_fleet(self) -> FleetReport:
        """Return the engines, and where they are not as they should be; for platform keys only."""
        return self.connection.get("/api/v1/fleet", FleetReport)

    def has_lost_redis(self) -> bool:
        """Say whether the gateway has a Redis and misses it; no where it does not say."""
        try:
            shown = self.connection.send("GET", "/metrics").text
        except ClientError as error:
            if isinstance(error, ConnectionFailedError):
                raise
            return False
        return _COUNTS_ALONE.search(shown) is not None

    def list_advice(self, tenant: str | None = None) -> list[Finding]:
        """Return what to change, and why, of one tenant or of all that this key sees."""
        return self.connection.list("/api/v1/advice", Finding, tenant=tenant)

    def read_stats(self, window: str) -> Stats:
        """Return the numbers to steer by of the last `1m`, `10m` or `1h`; this key's tenant's, or all."""
        return self.connection.get("/api/v1/stats", Stats, params={"window": window})

    def list_tenants(self) -> list[Tenant]:
        """Return the tenants that this key sees."""
        return self.connection.list("/api/v1/tenants", Tenant)

    def get_tenant(self, tenant: str) -> Tenant:
        """Return one tenant."""
        return self.connection.get(_tenant_path(tenant), Tenant)

    def create_tenant(self, name: str, **fields: Any) -> Tenant:
        """Create a tenant; `fields` that are None are left out."""
        body = {"name": name} | _present(fields)
        return decode(self.connection.send("POST", "/api/v1/tenants", json=body).content, Tenant)

    def update_tenant(self, tenant: str, changes: dict[str, Any]) -> Tenant:
        """Apply a merge patch: None removes."""
        return decode(self.connection.send("PATCH", _tenant_path(tenant), json=changes).content, Tenant)

    def delete_tenant(self, tenant: str, *, cascade: bool = False) -> None:
        """Delete a tenant, and with `cascade` its adapters."""
        self.connection.send("DELETE", _tenant_path(tenant), params={"cascade": "true" if cascade else None})

    def create_key(self, tenant: str, name: str, **fields: Any) -> Key:
        """Create a key; the answer alone holds its text."""
        body = {"name": name} | _present(fields)
        return decode(self.connection.send("POST", f"{_tenant_path(tenant)}/keys", json=body).content, Key)

    def list_keys(self, tenant: str) -> list[Key]:
        """Return a tenant's keys."""
        return self.connection.list(f"{_tenant_path(tenant)}/keys", Key)

    def revoke_key(self, tenant: str, key_id: str) -> None:
        """Revoke a key."""
        self.connection.send("DELETE", _key_path(tenant, key_id))

    def update_key(self, tenant: str, key_id: str, changes: dict[str, Any]) -> Key:
        """Apply a merge patch to a key: None removes."""
        return decode(self.connection.send("PATCH", _key_path(tenant, key_id), json=changes).content, Key)

    def rotate_key(self, tenant: str, key_id: str, **fields: Any) -> Key:
        """Make a key like another one, which ends after an overlap; the answer alone holds its text."""
        answer = self.connection.send("POST", f"{_key_path(tenant, key_id)}/rotate", json=_present(fields))
        return decode(answer.content, Key)

    def list_adapters(self, tenant: str) -> list[Adapter]:
        """Return a tenant's adapters."""
        return self.connection.list(f"{_tenant_path(tenant)}/adapters", Adapter)

    def get_adapter(self, tenant: str, adapter: str) -> Adapter:
        """Return one adapter."""
        return self.connection.get(_adapter_path(tenant, adapter), Adapter)

    def update_adapter(self, tenant: str, adapter: str, changes: dict[str, Any]) -> Adapter:
        """Apply a merge patch to an adapter: None removes."""
        return decode(self.connection.send("PATCH", _adapter_path(tenant, adapter), json=changes).content, Adapter)

    def delete_adapter(self, tenant: str, adapter: str) -> None:
        """Delete an adapter; its name is free at once."""
        self.connection.send("DELETE", _adapter_path(tenant, adapter))

    def resolve_adapter(self, ref: AdapterRef) -> str:
        """Return the adapter's name in `ref`: as written, else the tenant's default, else `default`."""
        if ref.adapter:
            return ref.adapter
        found = [adapter.name for adapter in self.list_adapters(ref.tenant) if adapter.is_default]
        return found[0] if found else DEFAULT_NAME

    def push(self, tenant: str, adapter: str, files: list[Path], on_read: Progress, **params: Any) -> VersionView:
        """Upload as `upload` does, and return the version."""
        return self.upload(tenant, adapter, files, on_read, **params).version

    def upload(self, tenant: str, adapter: str, files: list[Path], on_read: Progress, **params: Any) -> Upload:
        """Upload a PEFT folder's files as a version.

        Args:
            tenant: Whose adapter.
            adapter: Its name; it exists from its first version.
            files: What to send; each is read while it is sent.
            on_read: Told of bytes as they are read.
            params: `promote`, `wait`, `base` as the route takes them.

        Raises:
            ClientError: It was refused; `report` then says why.
        """
        answer = self._send_files(tenant, adapter, files, on_read, params)
        return Upload(decode(answer.content, VersionView), is_new=answer.status_code != httpx.codes.OK)

    def list_versions(self, tenant: str, adapter: str) -> list[VersionView]:
        """Return an adapter's versions, newest first."""
        return self.connection.list(f"{_adapter_path(tenant, adapter)}/versions", VersionView)

    def get_version(self, tenant: str, adapter: str, number: int) -> VersionView:
        """Return one version."""
        return self.connection.get(_version_path(tenant, adapter, number), VersionView)

    def resolve_version(self, ref: AdapterRef) -> VersionView:
        """Return the version that `ref` names: a number, a digest's beginning, an alias, or by default `live`."""
        adapter = self.resolve_adapter(ref)
        which = ref.which or LIVE
        if which.isascii() and which.isdigit():
            return self.get_version(ref.tenant, adapter, int(which))
        if which.startswith("sha256:"):
            return self._find_by_digest(ref.tenant, adapter, which)
        alias = self.get_alias(ref.tenant, adapter, which)
        return self.get_version(ref.tenant, adapter, alias.targets[0].version)

    def retire(self, tenant: str, adapter: str, number: int) -> None:
        """Retire a version; it can be restored for thirty days."""
        self.connection.send("DELETE", _version_path(tenant, adapter, number))

    def restore(self, tenant: str, adapter: str, number: int) -> VersionView:
        """Make a retired version ready again."""
        answer = self.connection.send("POST", f"{_version_path(tenant, adapter, number)}/restore")
        return decode(answer.content, VersionView)

    def quarantine(self, tenant: str, adapter: str, number: int) -> VersionView:
        """Take a version out of service; for admins only."""
        answer = self.connection.send("POST", f"{_version_path(tenant, adapter, number)}/quarantine")
        return decode(answer.content, VersionView)

    def release(self, tenant: str, adapter: str, number: int) -> VersionView:
        """Make a quarantined version ready again; for admins only."""
        answer = self.connection.send("POST", f"{_version_path(tenant, adapter, number)}/release")
        return decode(answer.content, VersionView)

    def list_aliases(self, tenant: str, adapter: str) -> list[Alias]:
        """Return all aliases of an adapter."""
        return self.connection.list(f"{_adapter_path(tenant, adapter)}/aliases", Alias)

    def get_alias(self, tenant: str, adapter: str, alias: str) -> Alias:
        """Return where an alias points."""
        return self.connection.get(_alias_path(tenant, adapter, alias), Alias)

    def promote(self, tenant: str, adapter: str, number: int) -> MovedAlias:
        """Point `live` at one version.

        Raises:
            ClientError: The version is not ready, or somebody else moved the alias at the same time.
        """
        return self.set_alias(tenant, adapter, LIVE, [Target(number, 100)])

    def set_alias(
        self, tenant: str, adapter: str, alias: str, targets: Sequence[Target], revision: int | None = None
    ) -> MovedAlias:
        """Point an alias at versions; it must be at `revision` (0: not there), by default at what it is read to be.

        Raises:
            ClientError: A version is not ready, or somebody else moved the alias meanwhile.
        """
        path = _alias_path(tenant, adapter, alias)
        condition, before = self._read_condition(path) if revision is None else (_be_at(revision), None)
        answer = self.connection.send("PUT", path, json={"targets": msgspec.to_builtins(targets)}, headers=condition)
        return MovedAlias(decode(answer.content, Alias), answer.status_code == httpx.codes.CREATED, before)

    def delete_alias(self, tenant: str, adapter: str, alias: str) -> None:
        """Delete an alias."""
        self.connection.send("DELETE", _alias_path(tenant, adapter, alias))

    def roll_back(self, tenant: str, adapter: str, alias: str = LIVE) -> Alias:
        """Point an alias at what it pointed to before."""
        return decode(self.connection.send("POST", f"{_alias_path(tenant, adapter, alias)}/rollback").content, Alias)

    def list_history(self, tenant: str, adapter: str, alias: str = LIVE) -> list[AliasChange]:
        """Return every change of an alias, newest first."""
        return self.connection.list(f"{_alias_path(tenant, adapter, alias)}/history", AliasChange)

    def warm(self, tenant: str, adapter: str, number: int) -> list[WarmReplica]:
        """Have every engine of its base load a version, and return what came of it."""
        answer = self.connection.send("POST", f"{_version_path(tenant, adapter, number)}/warm")
        return decode(answer.content, Warmth).replicas

    def list_outcomes(self, tenant: str, adapter: str, **params: Any) -> list[Outcomes]:
        """Return how generations ended, by minute and version, newest first; `params` as the route takes them."""
        return self.connection.list(f"{_adapter_path(tenant, adapter)}/outcomes", Outcomes, **params)

    def list_events(self, max_events: int, **params: Any) -> list[Event]:
        """Return the newest events; `params` as the route takes them."""
        return self.connection.list("/api/v1/audit", Event, max_items=max_events, **params)

    def download_all(self, version: VersionView, folder: Path, on_write: Progress) -> list[str]:
        """Write a version's files into `folder` and return their names.

        Raises:
            ClientError: A file that every adapter has is missing, or the server refused.
        """
        names = []
        for name in (*REQUIRED_FILES, *OPTIONAL_FILES):
            try:
                self._download(version, name, folder / name, on_write)
            except ClientError as error:
                if error.status != httpx.codes.NOT_FOUND or name in REQUIRED_FILES:
                    raise
            else:
                names.append(name)
        return names

    def list_usage(self, **params: Any) -> list[dict[str, Any]]:
        """Return sums of usage, a row a group; `params` as the route takes them."""
        return self.connection.list("/api/v1/usage", dict, **params)

    def list_usage_rows(self, max_rows: int | None = None, **params: Any) -> list[dict[str, Any]]:
        """Return usage request by request, newest first; `params` as the route takes them."""
        return self.connection.list("/api/v1/usage/requests", dict, max_items=max_rows, **params)

    def reconcile_usage(self) -> Reconciliation:
        """Return the usage rows of each engine's process beside what that counted itself."""
        return self.connection.get("/api/v1/usage/reconcile", Reconciliation)

    def _download(self, version: VersionView, name: str, target: Path, on_write: Progress) -> None:
        """Write one file under a temporary name, and under its own when it is whole."""
        path = f"{_version_path(version.tenant, version.adapter, version.version)}/files/{quote(name, safe='')}"
        draft = target.with_name(f".{target.name}.part")
        try:
            with self.connection.http.stream("GET", path) as response:
                check_response(response)
                with draft.open("wb") as file:
                    for chunk in response.iter_bytes():
                        file.write(chunk)
                        on_write(len(chunk))
            draft.replace(target)
        except httpx.TransportError as error:
            raise lost(self.connection.url, error) from error
        finally:
            draft.unlink(missing_ok=True)

    def _send_files(
        self, tenant: str, adapter: str, files: list[Path], on_read: Progress, params: dict[str, Any]
    ) -> httpx.Response:
        with ExitStack() as stack:
            parts = [
                ("files", (path.name, stack.enter_context(CountingFile(path, on_read)), "application/octet-stream"))
                for path in files
            ]
            return self.connection.send(
                "POST", f"{_adapter_path(tenant, adapter)}/versions", files=parts, params=params
            )

    def _find_by_digest(self, tenant: str, adapter: str, prefix: str) -> VersionView:
        found = [version for version in self.list_versions(tenant, adapter) if version.digest.startswith(prefix)]
        if len(found) != 1:
            raise ClientError(f"{len(found)} versions of {tenant}/{adapter} begin with {prefix}.", code="not_found")
        return found[0]

    def _read_condition(self, path: str) -> tuple[dict[str, str], Alias | None]:
        """Return the header that makes a PUT fail if the alias changes meanwhile, and what it is now."""
        try:
            answer = self.connection.send("GET", path)
        except ClientError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
            return {"if-none-match": "*"}, None
        return {"if-match": answer.headers["etag"]}, decode(answer.content, Alias)


def _be_at(revision: int) -> dict[str, str]:
    return {"if-match": f'"{revision}"'} if revision else {"if-none-match": "*"}


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _tenant_path(tenant: str) -> str:
    return f"/api/v1/tenants/{quote(tenant, safe='')}"


def _key_path(tenant: str, key_id: str) -> str:
    return f"{_tenant_path(tenant)}/keys/{quote(key_id, safe='')}"


def _adapter_path(tenant: str, adapter: str) -> str:
    return f"{_tenant_path(tenant)}/adapters/{quote(adapter, safe='')}"


def _version_path(tenant: str, adapter: str, number: int) -> str:
    return f"{_adapter_path(tenant, adapter)}/versions/{number}"


def _alias_path(tenant: str, adapter: str, alias: str) -> str:
    return f"{_adapter_path(tenant, adapter)}/aliases/{quote(alias, safe='')}"
