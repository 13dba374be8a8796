"""The cookie that carries a session's token. Pure.

Its name binds it to this host and to TLS. Browsers take such a name over TLS only, so on a loopback host, where there
may be none, it is another one, unless a trusted proxy says that there is.
"""

from __future__ import annotations

import ipaddress

_NAME = "__Host-loraplex"
_LOOPBACK_NAME = "loraplex"


def build_cookie(host: str, scheme: str, token: str, max_age_s: int) -> str:
    """Return a Set-Cookie value for a browser that called `host`; no seconds end the cookie."""
    secure = "; Secure" if _is_secure(host, scheme) else ""
    return f"{_name(host, scheme)}={token}; Max-Age={max_age_s}; Path=/; HttpOnly; SameSite=Strict{secure}"


def read_cookie(host: str, scheme: str, header: str) -> str | None:
    """Return the token in a Cookie header, None if there is none."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return next((value for name, _, value in pairs if name == _name(host, scheme)), None)


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine by a name that never leaves it."""
    name = host.rsplit("]", 1)[0].removeprefix("[") if host.startswith("[") else host.split(":", 1)[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str, scheme: str) -> str:
    return _NAME if _is_secure(host, scheme) else _LOOPBACK_NAME


def _is_secure(host: str, scheme: str) -> bool:
    """Elsewhere than on this machine always, whatever is said: a key goes over TLS or not at all."""
    return scheme == "https" or not is_loopback(host)
