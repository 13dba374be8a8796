"""The cookie that carries a session's token. Pure.

Its name binds it to this host and to TLS. Browsers take such a name over TLS only, so on a loopback host, where there
may be none, it is another one.
"""

from __future__ import annotations

import ipaddress

_NAME = "__Host-loraplex"
_LOOPBACK_NAME = "loraplex"


def build_cookie(host: str, token: str, max_age_s: int) -> str:
    """Return a Set-Cookie value for a browser that called `host`; no seconds end the cookie."""
    secure = "" if is_loopback(host) else "; Secure"
    return f"{_name(host)}={token}; Max-Age={max_age_s}; Path=/; HttpOnly; SameSite=Strict{secure}"


def read_cookie(host: str, header: str) -> str | None:
    """Return the token in a Cookie header, None if there is none."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return next((value for name, _, value in pairs if name == _name(host)), None)


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine by a name that never leaves it."""
    name = host.rsplit("]", 1)[0].removeprefix("[") if host.startswith("[") else host.split(":", 1)[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    return _LOOPBACK_NAME if is_loopback(host) else _NAME
