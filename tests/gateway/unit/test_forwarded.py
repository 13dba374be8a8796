"""Who calls where proxies stand in front: only trusted ones are believed, and only as far as they saw."""

from __future__ import annotations

import time
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import SettingsError
from loraplex.gateway.forwarded import Forwarded, find_client
from loraplex.settings import read_networks

PROXIES = read_networks("10.0.0.0/8, fd00:8::/32, 192.0.2.7")
PROXY, CLIENT = "10.1.2.3", "203.0.113.5"


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (CLIENT, CLIENT),
        (f"{CLIENT}:51234", CLIENT),
        (f" {CLIENT}\t", CLIENT),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:DB8:0::1]:443", "2001:db8::1"),
        ("::ffff:203.0.113.5", CLIENT),
        # a chain of proxies, all known
        (f"{CLIENT}, 10.9.9.9, fd00:8::5, 192.0.2.7", CLIENT),
        (f"{CLIENT}, [fd00:8::5]:80, ::ffff:10.1.1.1", CLIENT),
        # what the client says of itself stands left of it
        (f"198.51.100.1, {CLIENT}", CLIENT),
        (f"10.0.0.1, {CLIENT}, 10.9.9.9", CLIENT),
        (f"127.0.0.1, <script>, \xff, , {CLIENT}", CLIENT),
        (f", {CLIENT}", CLIENT),
        (f"{'x' * 10240}, {CLIENT}", CLIENT),
        (f"{'198.51.100.1, ' * 800}{CLIENT}", CLIENT),
        # everybody is known: the one furthest away
        ("10.4.4.4, 10.5.5.5", "10.4.4.4"),
        # no list of addresses
        ("", PROXY),
        (" ", PROXY),
        ("unknown", PROXY),
        ("_hidden", PROXY),
        (f'"{CLIENT}"', PROXY),
        (f"{CLIENT},", PROXY),
        (f"{CLIENT} 10.0.0.1", PROXY),
        (f"{CLIENT}:", PROXY),
        (f"{CLIENT}:123456", PROXY),
        ("203.0.113.5/32", PROXY),
        ("203.0.113.256", PROXY),
        ("203.0.113.05", PROXY),
        ("203.0.113", PROXY),
        ("3405803781", PROXY),
        ("0xcb007105", PROXY),
        ("fe80::1%eth0", PROXY),
        ("[2001:db8::1", PROXY),
        ("2001:db8::1]:443", PROXY),
        ("[203.0.113.5]x", PROXY),
        ("2001:db8::1::2", PROXY),
        (":", PROXY),
        ("localhost", PROXY),
        ("\u0661.2.3.4", PROXY),
        ("203.0.113.5\x00", PROXY),
        ("x" * 10240, PROXY),
        (", " * 5000, PROXY),
        ("garbage, 10.5.5.5", PROXY),
        (", ".join(["10.5.5.5"] * 17), PROXY),
    ],
)
def test_a_trusted_peer_is_believed_as_far_as_it_saw(forwarded: str, client: str) -> None:
    assert find_client(PROXY, [forwarded.encode()], PROXIES) == client
    assert find_client("198.51.100.9", [forwarded.encode()], PROXIES) == "198.51.100.9"


def test_several_headers_are_one_list() -> None:
    assert find_client(PROXY, [CLIENT.encode(), b"198.51.100.1", b"10.1.1.1"], PROXIES) == "198.51.100.1"
    assert find_client(PROXY, [], PROXIES) == PROXY


def test_a_proxy_that_is_heard_over_ipv6_is_the_same() -> None:
    assert find_client("::ffff:10.1.2.3", [CLIENT.encode()], PROXIES) == CLIENT
    assert find_client("fd00:8::1", [CLIENT.encode()], PROXIES) == CLIENT
    assert find_client("fd00:9::1", [CLIENT.encode()], PROXIES) == "fd00:9::1"


ADDRESSES = st.ip_addresses().map(str) | st.sampled_from(["10.0.0.1", "192.0.2.7", "fd00:8::1", "127.0.0.1", ""])
HEADERS = st.lists(
    st.binary(max_size=60) | st.lists(ADDRESSES, max_size=5).map(lambda some: ", ".join(some).encode()), max_size=4
)


def is_outside(text: str) -> bool:
    return not any(ip_address(text) in network for network in PROXIES)


@given(st.ip_addresses().map(str).filter(is_outside) | st.text(max_size=10), HEADERS)
def test_an_untrusted_peer_never_changes_its_address(peer: str, forwarded: list[bytes]) -> None:
    assert find_client(peer, forwarded, PROXIES) == peer


@given(st.ip_addresses(v=4).map(str).filter(is_outside), HEADERS, st.integers(0, 3))
def test_what_a_client_sends_never_changes_what_its_proxies_saw(
    client: str, sent: list[bytes], num_proxies: int
) -> None:
    seen = ", ".join([client, *["10.5.5.5"] * num_proxies]).encode()
    assert find_client(PROXY, [*sent, seen], PROXIES) == client
    # or the proxy goes on in the same header
    assert find_client(PROXY, [b", ".join([*sent, seen])], PROXIES) == client


def test_a_long_header_takes_no_time() -> None:
    began_s = time.process_time()
    for _ in range(100):
        find_client(PROXY, [b"10.5.5.5," * 100_000], PROXIES)
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    ("peer", "headers", "expected"),
    [
        (PROXY, [], (PROXY, 9, "http")),
        (PROXY, [("X-Forwarded-For", CLIENT), ("X-Forwarded-Proto", "https")], (CLIENT, 0, "https")),
        (PROXY, [("x-forwarded-proto", "https, HTTP ")], (PROXY, 9, "http")),
        (PROXY, [("x-forwarded-proto", "http"), ("x-forwarded-proto", "https")], (PROXY, 9, "https")),
        (PROXY, [("x-forwarded-proto", "javascript")], (PROXY, 9, "http")),
        (PROXY, [("forwarded", f"for={CLIENT};proto=https"), ("x-real-ip", CLIENT)], (PROXY, 9, "http")),
        ("198.51.100.9", [("x-forwarded-for", CLIENT), ("x-forwarded-proto", "https")], ("198.51.100.9", 9, "http")),
    ],
)
async def test_what_is_inside_sees_client_and_scheme(
    peer: str, headers: list[tuple[str, str]], expected: tuple[str, int, str]
) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((*scope["client"], scope["scheme"]))

    raw = [(name.encode(), value.encode()) for name, value in headers]
    scope: Any = {"type": "http", "client": (peer, 9), "scheme": "http", "headers": raw}
    await Forwarded(app, PROXIES)(scope, None, None)  # type: ignore[arg-type]
    assert seen == [expected]
    assert scope["client"] == (peer, 9)


async def test_a_peer_without_an_address_is_nobody() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"])

    scope: Any = {"type": "http", "client": None, "scheme": "http", "headers": [(b"x-forwarded-for", CLIENT.encode())]}
    await Forwarded(app, PROXIES)(scope, None, None)  # type: ignore[arg-type]
    assert seen == [None]


@pytest.mark.parametrize(
    "text", ["10.0.0.1/8", "0.0.0.0/0", "::/0", "proxy.test", "10.0.0.0/8,", "10.0.0.0/33", "::ffff:10.0.0.0/104", "*"]
)
def test_what_is_no_network_of_proxies_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="LORAPLEX_TRUSTED_PROXIES"):
        read_networks(text)


def test_no_networks_are_none() -> None:
    assert read_networks("") == read_networks(" ") == ()
