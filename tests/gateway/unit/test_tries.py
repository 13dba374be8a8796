"""How failed tries of keys are counted: by network and key id, within bounds, together with other gateways."""

from __future__ import annotations

import pytest

from loraplex.gateway.tries import TryLimit


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_an_address_and_a_key_id_have_so_many_tries_each(clock: Clock) -> None:
    limit = TryLimit(5, clock)
    for number in range(5):
        assert await limit.find_wait_s("10.0.0.1", f"lpx_other{number:05}") is None
        await limit.note_failure("10.0.0.1", f"lpx_other{number:05}")
    assert await limit.find_wait_s("10.0.0.1", "lpx_aaaaaaaaaa_x") == 61
    assert await limit.find_wait_s("10.0.0.2", "lpx_aaaaaaaaaa_x") is None
    for number in range(5):
        await limit.note_failure(f"10.0.1.{number}", f"lpx_aaaaaaaaaa_{number}")
    assert await limit.find_wait_s("10.0.0.2", "lpx_aaaaaaaaaa_y") == 61
    assert await limit.find_wait_s("10.0.0.2", "lpx_bbbbbbbbbb_y") is None
    clock.now += 60.0
    assert await limit.find_wait_s("10.0.0.1", "lpx_aaaaaaaaaa_x") is None


async def test_a_host_with_a_network_of_addresses_is_one(clock: Clock) -> None:
    limit = TryLimit(5, clock)
    for number in range(5):
        await limit.note_failure(f"2001:db8::{number}", f"key{number}")
    assert await limit.find_wait_s("2001:db8::ffff", "other") is not None
    assert await limit.find_wait_s("2001:db9::1", "other") is None
    for number in range(5):
        await limit.note_failure("::ffff:10.0.0.9", f"mapped{number}")
    assert await limit.find_wait_s("10.0.0.9", "other") is not None
    for odd in ("", "not an address", "fe80::1%eth0"):
        await limit.note_failure(odd, "\ud800")


async def test_what_it_remembers_is_bounded_and_holds_no_secret(clock: Clock) -> None:
    limit = TryLimit(5, clock)
    for number in range(12_000):
        await limit.note_failure(f"10.{number >> 16}.{(number >> 8) & 255}.{number & 255}", f"lpx_key{number}_secret")
    assert len(limit._tries) <= 10_002
    assert not any("secret" in subject or "lpx_" in subject for subject in limit._tries)


class Shared:
    """What other gateways have seen."""

    def __init__(self) -> None:
        self.instants: list[float] = []
        self.noted: list[tuple[str, ...]] = []

    async def find(self, subjects: tuple[str, ...], num: int) -> list[float]:
        return self.instants

    async def note(self, subjects: tuple[str, ...], num: int, at: float) -> None:
        self.noted.append(tuple(subjects))


async def test_what_other_gateways_saw_counts_but_not_their_clocks(clock: Clock) -> None:
    limit, shared = TryLimit(5, clock), Shared()
    limit.shared = shared
    assert await limit.find_wait_s("10.0.0.1", "key") is None
    await limit.note_failure("10.0.0.1", "key")
    assert shared.noted[0][0] == "from:10.0.0.1"
    shared.instants = [clock.now - 20]
    assert await limit.find_wait_s("10.0.0.1", "key") == 41
    for at in (clock.now - 61, clock.now + 1e9, float("nan"), float("-inf")):
        shared.instants = [at]
        assert await limit.find_wait_s("10.0.0.1", "key") is None
