"""What pages need of the registry, which runs in this process or would be called as if it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from litestar import Request
from litestar.response import Stream

from loraplex_registry.wire.adapter import AdapterView, AliasChangeView, AliasView, ManifestFile, Target, VersionView
from loraplex_registry.wire.identity import Identity


class AdapterConsole(Protocol):
    """Adapters of the target tenant of `by`, as its scopes allow; errors have a `code` of the API's table.

    A `revision` is the one that was seen: another one now is `precondition_failed`. None: the alias was not set.
    """

    @property
    def purge_after_days(self) -> int:
        """How long a retired version can be restored."""

    @property
    def max_upload_bytes(self) -> int:
        """How much an upload in one body may be."""

    async def show(self, by: Identity, adapter: str) -> AdapterView:
        """Return an adapter."""

    async def list_versions(
        self, by: Identity, adapter: str, limit: int, cursor: str | None
    ) -> tuple[list[VersionView], str | None]:
        """Return a page of versions, newest first, and the cursor of the next one."""

    async def show_version(
        self, by: Identity, adapter: str, number: int
    ) -> tuple[VersionView, tuple[ManifestFile, ...]]:
        """Return a version and its files."""

    async def open_file(self, by: Identity, adapter: str, number: int, name: str) -> Stream:
        """Return the answer that sends a file."""

    async def list_aliases(self, by: Identity, adapter: str) -> list[AliasView]:
        """Return the aliases that are set."""

    async def list_changes(self, by: Identity, adapter: str, alias: str) -> list[AliasChangeView]:
        """Return what an alias pointed to lately, newest first."""

    async def move_alias(
        self, by: Identity, adapter: str, alias: str, targets: Sequence[Target], revision: int | None
    ) -> AliasView:
        """Point an alias to versions."""

    async def roll_back(self, by: Identity, adapter: str, alias: str, revision: int) -> AliasView:
        """Point an alias to where it pointed before."""

    async def delete_alias(self, by: Identity, adapter: str, alias: str, revision: int) -> None:
        """Delete an alias."""

    async def retire(self, by: Identity, adapter: str, number: int) -> VersionView:
        """Retire a version."""

    async def restore(self, by: Identity, adapter: str, number: int) -> VersionView:
        """Make a retired version what it was before."""

    async def quarantine(self, by: Identity, adapter: str, number: int) -> VersionView:
        """Take a version out of service."""

    async def release(self, by: Identity, adapter: str, number: int) -> VersionView:
        """Make a quarantined version ready again."""

    async def make_default(self, by: Identity, adapter: str) -> AdapterView:
        """Let the tenant's bare name mean an adapter."""

    async def delete(self, by: Identity, adapter: str) -> None:
        """Delete an adapter."""

    async def upload(self, by: Identity, adapter: str, request: Request[Any, Any, Any]) -> tuple[int, Any]:
        """Take a version from the body of a request and return status and view."""
