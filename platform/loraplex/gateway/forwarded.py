"""Who calls where proxies stand in front: what trusted ones say of it, and nothing that anybody else says. Pure.

Each proxy adds at the right end of `X-Forwarded-For` whom it heard. So the header is read from there, past the proxies
that are trusted, and what stands left of the first other address was said by that one and counts for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import cast

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from loraplex.settings import Network

_MAX_HOPS = 16
_HOP = re.compile(rb"([0-9.]{7,15})(?::[0-9]{1,5})?|\[([0-9A-Fa-f:.]{2,45})\](?::[0-9]{1,5})?|([0-9A-Fa-f:.]{2,45})")
_FOR, _PROTO = b"x-forwarded-for", b"x-forwarded-proto"
_SCHEMES = (b"http", b"https")
Address = IPv4Address | IPv6Address


class Forwarded:
    """Wraps the whole application: within it `client` and `scheme` are those of the client."""

    def __init__(self, app: ASGIApp, proxies: Sequence[Network]) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == ScopeType.HTTP and scope["client"] is not None:
            scope = self._find_true(scope, scope["client"])
        await self._app(scope, receive, send)

    def _find_true(self, scope: Scope, peer: tuple[str, int]) -> Scope:
        if not is_trusted(_read_plain(peer[0]), self._proxies):
            return scope
        address = find_client(peer[0], _values(scope, _FOR), self._proxies)
        scheme = b",".join(_values(scope, _PROTO)).rpartition(b",")[2].strip().lower()
        found = {
            "client": peer if address == peer[0] else (address, 0),
            "scheme": scheme.decode() if scheme in _SCHEMES else scope["scheme"],
        }
        return cast("Scope", {**scope, **found})


def find_client(peer: str, forwarded: Iterable[bytes], proxies: Sequence[Network]) -> str:
    """Return the address of who called.

    Args:
        peer: The other end of the connection.
        forwarded: The values of all headers `X-Forwarded-For`, in their order.
        proxies: The networks that are trusted.

    Returns:
        `peer` if it is not trusted, or if what it says is no list of addresses; else the rightmost address that is not
        trusted, or the leftmost of all if each is.
    """
    if not is_trusted(_read_plain(peer), proxies):
        return peer
    hops = b",".join(forwarded).rsplit(b",", _MAX_HOPS)
    for hop in reversed(hops[-_MAX_HOPS:]):
        address = _read_hop(hop.strip(b" \t"))
        if address is None:
            return peer
        if not is_trusted(address, proxies):
            return str(address)
    return peer if len(hops) > _MAX_HOPS else str(address)


def is_trusted(address: Address | None, proxies: Sequence[Network]) -> bool:
    """Whether an address lies in one of the networks."""
    return address is not None and any(address in network for network in proxies)


def _values(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name.lower() == wanted]


def _read_hop(text: bytes) -> Address | None:
    """An address, perhaps with a port; IPv6 with a port in brackets."""
    found = _HOP.fullmatch(text)
    return None if found is None else _read_plain((found[1] or found[2] or found[3]).decode())


def _read_plain(text: str) -> Address | None:
    """An address; one of IPv4 in the clothes of IPv6 is that of IPv4."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
