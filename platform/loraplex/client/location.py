"""Where the server is and with which key it is called: the environment first, else the platform on this machine.

The admin key of a local data folder goes only to the URL that the same folder names, never to another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.client.errors import NoKeyError
from loraplex_registry.wire.setting import read_settings

URL_FILE = "url"
ADMIN_KEY_FILE = "admin.key"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Location:
    """Address of a gateway and the key to call it with; `key` is None where none is known.

    `is_direct` says that no proxy of the environment may stand between, as one would see the key.
    """

    url: str
    key: str | None = field(repr=False)
    is_direct: bool = False

    def require_key(self) -> str:
        """Return the key.

        Raises:
            NoKeyError: None is known.
        """
        if not self.key:
            raise NoKeyError
        return self.key


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach `host`."""
    return host in _LOOPBACK


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder of a one-machine platform: LORAPLEX_DATA_DIR, else `loraplex` under the user's data folder."""
    told = environ.get("LORAPLEX_DATA_DIR")
    if told:
        return Path(told).expanduser()
    shared = environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "loraplex"


def find_location(environ: Mapping[str, str]) -> Location:
    """Return where to call, from LORAPLEX_URL and LORAPLEX_API_KEY or else from the local data folder.

    Raises:
        SettingError: A setting's name is misspelt or its file cannot be read.
    """
    settings = read_settings(environ, "client")
    data_dir = default_data_dir(environ)
    local_url = _read(data_dir / URL_FILE)
    is_told = bool(environ.get("LORAPLEX_URL") or environ.get("LORAPLEX_URL_FILE"))
    url = (settings["url"] if is_told else local_url or settings["url"]).rstrip("/")
    is_local = url == local_url
    local_key = _read(data_dir / ADMIN_KEY_FILE) if is_local else None
    return Location(url, settings.get("api_key") or local_key, is_direct=is_local)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
