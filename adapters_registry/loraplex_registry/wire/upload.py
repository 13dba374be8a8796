"""Uploads in parts as the management API shows them, to whoever sends the parts."""

from __future__ import annotations

import msgspec

from loraplex_registry.wire.adapter import ManifestFile


class PartView(msgspec.Struct, frozen=True, kw_only=True):
    """A part: number `number` (from 0) of the file `file`; the last four are None once it needs no sending."""

    file: str
    number: int
    size: int
    sha256: str
    received: bool
    url: str | None = None
    method: str | None = None
    headers: dict[str, str] | None = None
    expires_at: str | None = None


class UploadView(msgspec.Struct, frozen=True, kw_only=True):
    """An upload in parts; `state` is `open`, `completing` or `completed`, sizes are in bytes."""

    id: str
    state: str
    expires_at: str
    size_bytes: int
    received_bytes: int
    files: list[ManifestFile]
    parts: list[PartView]
