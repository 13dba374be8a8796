"""What an upload asks for and what it leads to: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.wire.adapter import ManifestFile, Report, VersionView
from loraplex_registry.wire.identity import Identity

Promote = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class UploadOrder:
    """An upload as the client asked for it, before its body is read."""

    tenant: TenantRef
    adapter: str
    by: Identity
    boundary: str
    """Of the multipart body."""

    promote: Promote = "auto"
    is_dry_run: bool = False
    base: str | None = None
    """A base named by an admin, whatever the config says."""

    wait_s: float = 30.0
    """How long the verdict may take."""

    idempotency_key: str | None = None


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
    """The answer to an upload that was not refused: 201 new, 200 same content or dry run."""

    status: int
    body: VersionView | DryRunView
