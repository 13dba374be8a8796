"""Where the server is and with which key it is called: the environment first, else the platform on this machine.

The admin key of a local data folder goes only to the URL that the same folder names, never to another one.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.client.errors import ClientError, NoKeyError
from loraplex_registry.wire.setting import SettingError, read_settings

URL_FILE = "url"
ADMIN_KEY_FILE = "admin.key"
LOCK_FILE = "lock"
_WHOSE = ("LORAPLEX_URL", "LORAPLEX_API_KEY")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Location:
    """Address of a gateway and the key to call it with; `key` is None where none is known.

    `is_direct` says that no proxy of the environment may stand between, as one would see the key; `problem` says why
    there is no key.
    """

    url: str
    key: str | None = field(repr=False)
    is_direct: bool = False
    problem: str = field(default="", compare=False)

    def require_key(self) -> str:
        """Return the key.

        Raises:
            NoKeyError: None is known.
        """
        if not self.key:
            raise NoKeyError(self.problem or None)
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
        SettingError: A setting's name is misspelt, its file cannot be read, or it is set and empty.
        ClientError: LORAPLEX_URL is no URL.
    """
    for name, message in find_empty(environ).items():
        raise SettingError(message, param=name)
    settings = read_settings(environ, "client")
    data_dir = default_data_dir(environ)
    local_url = _read(data_dir / URL_FILE)
    is_told = bool(environ.get("LORAPLEX_URL") or environ.get("LORAPLEX_URL_FILE"))
    told_url = settings["url"].rstrip("/")
    check_url(told_url)
    is_local = local_url is not None and (not is_told or _is_same_place(told_url, local_url))
    if local_url is None or not is_local:
        problem = _explain_no_key(told_url if is_told else None, local_url, data_dir)
        return Location(told_url, settings.get("api_key"), problem=problem)
    return Location(local_url, settings.get("api_key") or _read(data_dir / ADMIN_KEY_FILE), is_direct=True)


def find_empty(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of LORAPLEX_URL and LORAPLEX_API_KEY is set and empty, each with a sentence that says so.

    Mostly it is what a command that failed has not printed, and must not come to mean this machine's admin key.
    """
    return {
        name: f"{name} is set but empty; set it to what you meant, or unset it to call the platform on this machine"
        for name in _WHOSE
        if not environ.get(name, "set").strip() and not environ.get(f"{name}_FILE")
    }


def check_url(url: str) -> None:
    """Return if `url` is one that can be called.

    Raises:
        ClientError: It is not.
    """
    if not url.startswith(("http://", "https://")):
        raise ClientError(f"LORAPLEX_URL is {url!r}: add http:// or https:// before it.", code="invalid_url")


def _is_same_place(url: str, local_url: str) -> bool:
    """Say whether both name one port of this machine; the local spelling is then called, whatever `localhost` means."""
    return url.replace("//localhost", "//127.0.0.1", 1) == local_url.replace("//localhost", "//127.0.0.1", 1)


def _explain_no_key(told_url: str | None, local_url: str | None, data_dir: Path) -> str:
    if told_url and local_url:
        return (
            f"LORAPLEX_URL is {told_url}, but your platform on this machine is at {local_url}. Set LORAPLEX_API_KEY to "
            "a key of the former, or unset LORAPLEX_URL."
        )
    if told_url:
        return f"There is no API key for {told_url}; set LORAPLEX_API_KEY."
    if is_locked(data_dir / LOCK_FILE):
        return f"The platform in {data_dir} is still starting; try again when `loraplex up` has said its URL."
    return (
        f"No platform of yours runs here (in {data_dir}); start `loraplex up`, name its folder by LORAPLEX_DATA_DIR, "
        "or set LORAPLEX_URL and LORAPLEX_API_KEY."
    )


def is_locked(path: Path) -> bool:
    """Say whether a running `loraplex up` holds the folder's lock."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
