"""What an upload asks for and what it leads to: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from loraplex_registry.adapters.pending import Promote
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.wire.adapter import ManifestFile, Report, VersionView
from loraplex_registry.wire.identity import AdapterLimits, Identity

__all__ = ["DryRunView", "Promote", "StagedFile", "UploadOrder", "UploadResult"]


@dataclass(frozen=True, kw_only=True)
class UploadOrder:
    """An upload as the client asked for it, before its bytes are read."""

    tenant: TenantRef
    adapter: str
    by: Identity
    promote: Promote = "auto"
    is_dry_run: bool = False
    base: str | None = None
    """A base named by an admin, whatever the config says."""

    wait_s: float = 30.0
    """How long the verdict may take, the gate's included."""

    idempotency_key: str | None = None

    @property
    def limits(self) -> AdapterLimits:
        """What the tenant may store."""
        return self.by.limits or AdapterLimits()


@dataclass(frozen=True)
class StagedFile:
    """A file of an upload on our disk, with the sha256 of its bytes in hex."""

    path: Path
    size: int
    sha256: str

    def describe(self, name: str) -> ManifestFile:
        """Return what the manifest says of it."""
        return ManifestFile(name, self.size, self.sha256)


class DryRunView(msgspec.Struct, frozen=True, kw_only=True):
    """What a passed `?dry_run=true` answers: nothing was stored."""

    dry_run: bool
    base_model: str
    digest: str
    report: Report


@dataclass(frozen=True)
class UploadResult:
    """The answer to an upload that was not refused: 201 new, 200 same content or dry run; `Raw` is a stored one."""

    status: int
    body: VersionView | DryRunView | msgspec.Raw

    def encode(self) -> str:
        """Return the body as it is stored for requests that ask again."""
        return msgspec.json.encode(self.body).decode()
