"""Style sheets and scripts: read once, named by a hash of them all, so that browsers may keep them for a year.

One hash stands in the path of every file: scripts find each other by relative names and change their names together.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import msgspec

from loraplex.errors import NotFoundError

_FOLDER = Path(__file__).parent / "static"
_SUFFIX_TO_TYPE = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_FOR_A_YEAR = "public, max-age=31536000, immutable"


class Asset(msgspec.Struct, frozen=True):
    """A file as it is sent."""

    content: bytes
    packed: bytes
    media_type: str


class Assets:
    """All files of `static/`."""

    def __init__(self) -> None:
        self._assets = {file.name: _read(file) for file in sorted(_FOLDER.iterdir()) if file.suffix in _SUFFIX_TO_TYPE}
        contents = b"".join(name.encode() + asset.content for name, asset in self._assets.items())
        self.stamp = hashlib.sha256(contents).hexdigest()[:12]

    def find_url(self, name: str) -> str:
        """Return the address of a file."""
        assert name in self._assets, f"there is no {name}"
        return f"/ui/static/{self.stamp}/{name}"

    def get(self, stamp: str, name: str) -> tuple[Asset, str]:
        """Return a file, and how long browsers may keep it: one that was asked for by another hash is a newer one.

        Raises:
            NotFoundError: There is no such file.
        """
        if name not in self._assets:
            raise NotFoundError
        return self._assets[name], _FOR_A_YEAR if stamp == self.stamp else "no-cache"


def _read(file: Path) -> Asset:
    content = file.read_bytes()
    return Asset(content, gzip.compress(content, mtime=0), _SUFFIX_TO_TYPE[file.suffix])
