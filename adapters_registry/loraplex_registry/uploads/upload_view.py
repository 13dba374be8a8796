"""What the management API shows of an upload in parts: which have arrived, and how to send the others."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from loraplex_registry.adapters.view import show_time
from loraplex_registry.db.model import UploadRow
from loraplex_registry.storage.store import Part, PartStore, SignedPart
from loraplex_registry.uploads.announcement import FileAnnouncement, cut, read_files
from loraplex_registry.wire.adapter import ManifestFile
from loraplex_registry.wire.upload import PartView, UploadView

_URL_LIFE_S = 3600


def show_upload(store: PartStore, row: UploadRow, address: str) -> UploadView:
    """Return the view; asks the store, so it blocks.

    Args:
        store: Where the parts are.
        row: Of the upload.
        address: Where clients reach the uploads of the adapter.
    """
    files = read_files(row.files)
    if row.state == "completed":
        parts = [_show_part(files, part, received=True) for part in cut(files)]
    else:
        received = store.list(row.public_id)
        parts = [
            _show_part(files, part, received=True)
            if received.get(part.place) == part.size
            else _show_missing(store, row, files, part, address)
            for part in cut(files)
        ]
    return UploadView(
        id=row.public_id,
        state=row.state,
        expires_at=show_time(row.expires_at),
        size_bytes=row.size_bytes,
        received_bytes=sum(part.size for part in parts if part.received),
        files=[ManifestFile(file.name, file.size, file.sha256) for file in files],
        parts=parts,
    )


def _show_part(
    files: Sequence[FileAnnouncement], part: Part, *, received: bool, signed: SignedPart | None = None
) -> PartView:
    view = PartView(
        file=files[part.place.file].name,
        number=part.place.number,
        size=part.size,
        sha256=part.sha256,
        received=received,
    )
    if signed is None:
        return view
    return msgspec.structs.replace(
        view,
        url=signed.url,
        method=signed.method,
        headers=signed.headers,
        expires_at=show_time(signed.expires_at),
    )


def _show_missing(
    store: PartStore, row: UploadRow, files: Sequence[FileAnnouncement], part: Part, address: str
) -> PartView:
    if row.state != "open":
        return _show_part(files, part, received=False)
    left_s = (row.expires_at - datetime.now(UTC)).total_seconds()
    signed = store.sign(row.public_id, part, max(1, min(_URL_LIFE_S, int(left_s))))
    return _show_part(files, part, received=False, signed=signed or _point_here(row, part, address))


def _point_here(row: UploadRow, part: Part, address: str) -> SignedPart:
    """Let a part go through the registry, which checks the header that a store would check."""
    checksum = base64.b64encode(bytes.fromhex(part.sha256)).decode()
    url = f"{address}/{row.public_id}/files/{part.place.file}/parts/{part.place.number}"
    return SignedPart(url, "PUT", {"x-amz-checksum-sha256": checksum}, row.expires_at)
