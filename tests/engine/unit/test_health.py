from __future__ import annotations

import pytest

from loraplex_engine.errors import AdapterQuarantinedError, DigestMismatchError, LoadFailedError
from loraplex_engine.lora.health import MAX_CONTENT_FAILURES, AdapterHealth
from loraplex_engine.lora.packed import LoadFailed


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def _failed(is_content: bool, code: str = "adapter_loading") -> LoadFailed:
    return LoadFailed("d", "verify", code, "It is broken.", is_content)


def test_pause_between_tries_doubles_up_to_half_a_minute() -> None:
    clock = Clock()
    health = AdapterHealth(clock)
    pauses = []
    for _ in range(8):
        health.note_failure(_failed(is_content=False))
        pauses.append(health.state()["failed"]["d"]["retry_in_s"])
        assert isinstance(health.find_refusal("d"), LoadFailedError)
        clock.now += pauses[-1]
        assert health.find_refusal("d") is None
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_load_that_fails_by_its_bytes_five_times_is_final_until_it_is_asked_for_again() -> None:
    clock = Clock()
    health = AdapterHealth(clock)
    for _ in range(MAX_CONTENT_FAILURES):
        assert not isinstance(health.find_refusal("d"), AdapterQuarantinedError)
        clock.now += 100
        health.note_failure(_failed(is_content=True))
    clock.now += 1e6
    error = health.find_refusal("d")
    assert isinstance(error, AdapterQuarantinedError)
    assert "5 tries: It is broken." in str(error)
    assert health.state()["failed"] == {
        "d": {
            "reason": "It is broken.",
            "code": "adapter_loading",
            "attempts": 5,
            "is_content": True,
            "is_final": True,
            "retry_in_s": None,
        }
    }
    health.forgive("d")
    assert health.find_refusal("d") is None
    assert health.state() == {"failed": {}, "quarantined": {}}


def test_causes_outside_the_bytes_never_become_final() -> None:
    clock = Clock()
    health = AdapterHealth(clock)
    for index in range(50):
        health.note_failure(_failed(is_content=index % 20 == 0))
        clock.now += 30
        assert health.find_refusal("d") is None


def test_bytes_of_another_digest_are_named_as_such() -> None:
    health = AdapterHealth(Clock())
    health.note_failure(_failed(is_content=True, code="digest_mismatch"))
    assert isinstance(health.find_refusal("d"), DigestMismatchError)
    health.note_failure(_failed(is_content=True))
    assert isinstance(health.find_refusal("d"), LoadFailedError)
    health.note_loaded("d")
    assert health.find_refusal("d") is None


@pytest.mark.parametrize(("prompts", "strikes"), [("aaa", 0), ("aab", 0), ("abc", 3), ("abcd", 3)])
def test_three_different_prompts_quarantine_an_adapter(prompts: str, strikes: int) -> None:
    health = AdapterHealth(Clock())
    for prompt in prompts:
        health.strike("d", prompt.encode(), "Not finite.")
    expected = {"d": {"reason": "Not finite.", "strikes": strikes}} if strikes else {}
    assert health.state()["quarantined"] == expected
    assert isinstance(health.find_refusal("d"), AdapterQuarantinedError) == bool(strikes)
    assert health.find_refusal("other") is None
    health.forgive("d")
    assert health.find_refusal("d") is None
