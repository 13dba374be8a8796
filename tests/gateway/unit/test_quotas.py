"""What a request may cost, which limits it has to keep, and how refusals and standings are told."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.errors import QuotaExceededError, RateLimitExceededError
from loraplex.gateway.limiting import is_request
from loraplex.gateway.problem import describe
from loraplex.quotas.estimate import estimate_tokens
from loraplex.quotas.quota import Charge, Quota, Refusal, Standing, Subject, list_charges, list_quotas
from loraplex.quotas.refusal import build_refusal
from loraplex.quotas.standing import build_headers, show_duration
from loraplex.usage.record import Settlement
from loraplex_registry.wire.limits import MAX_LIMIT, RateLimits

TENANT, KEY = Subject("tenant", "t"), Subject("key", "k")


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 256),
        ({"prompt": "abcd", "max_tokens": 10}, 2 + 10),
        ({"prompt": "🙂", "max_tokens": 10}, 2 + 10),
        ({"prompt": "", "max_tokens": 10, "n": 3}, 30),
        ({"prompt": ["abc", "abcdef"], "max_tokens": 10, "n": 2}, 3 + 40),
        ({"prompt": [1, 2, 3], "max_tokens": 10}, 3 + 10),
        ({"prompt": [[1, 2], [3]], "max_tokens": 10}, 3 + 20),
        ({"messages": [{"role": "user", "content": "abcdef"}] * 2, "max_tokens": 5}, 4 + 16 + 5),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}], "max_tokens": 5}, 2 + 8 + 5),
        ({"messages": [], "tools": [{"function": {"name": "abc"}}], "max_completion_tokens": 7}, 10 + 7),
        ({"tools": [{"role": "a" * 300, "b" * 300: 1}], "max_tokens": 1}, 206 + 1),
        ({"messages": [], "tools": None, "max_tokens": 1}, 1),
        ({"prompt": None, "n": None, "max_tokens": None}, 256),
        ({"prompt": "", "max_tokens": -5, "n": -5}, 0),
        ({"prompt": "", "max_tokens": 10**40, "n": 10**40}, MAX_LIMIT),
        ({"messages": "no list", "prompt": {"a": [True, 1.5]}, "max_tokens": 1}, 3 + 2 + 1),
        ({"prompt": "\ud800", "max_tokens": 1}, 1 + 1),
    ],
)
def test_what_a_request_reserves(fields: dict[str, Any], tokens: int) -> None:
    assert estimate_tokens(fields) == tokens


def test_each_limit_that_is_set_is_a_quota_of_its_subject() -> None:
    limits = [(TENANT, RateLimits(requests_per_minute=5, tokens_per_day=9)), (KEY, None), (KEY, RateLimits())]
    quotas = list_quotas(limits)
    assert quotas == [Quota(TENANT, "requests_per_minute", 5), Quota(TENANT, "tokens_per_day", 9)]
    assert [charge.cost for charge in list_charges(quotas, 70)] == [1, 70]


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0s"), (1, "1ms"), (999, "999ms"), (1_000, "1s"), (59_600, "59.6s"), (60_000, "1m0s"), (60_001, "1m0.001s"),
        (3_599_999, "59m59.999s"), (3_600_000, "1h0m0s"), (90_061_000, "25h1m1s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_openai_does(duration_ms: int, text: str) -> None:
    assert show_duration(duration_ms) == text


def charge(kind: str, cost: int = 1, limit: int = 10, subject: Subject = TENANT) -> Charge:
    return Charge(Quota(subject, kind, limit), cost)


def test_headers_show_the_limit_that_has_least_left() -> None:
    charges = [
        charge("concurrent_requests"), charge("requests_per_minute"), charge("requests_per_minute", subject=KEY),
        charge("tokens_per_minute"), charge("tokens_per_month"),
    ]  # fmt: skip
    standings = [
        Standing(2, 0, 0), Standing(10, 9, 5_000), Standing(20, 8, 6_000), Standing(900, 800, 1), Standing(10**6, 70, 2)
    ]  # fmt: skip
    assert build_headers(charges, standings) == {
        "x-ratelimit-limit-requests": "20",
        "x-ratelimit-remaining-requests": "8",
        "x-ratelimit-reset-requests": "6s",
        "x-ratelimit-limit-tokens": "1000000",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "2ms",
    }
    assert build_headers(charges[:1], standings[:1]) == {}


def refuse(kind: str, wait_ms: int | None, remaining: int = 0, cost: int = 1) -> RateLimitExceededError:
    charges = (charge("requests_per_minute", subject=KEY), charge(kind, cost))
    standings = (Standing(5, 5, 0), Standing(10, remaining, 86_000_000))
    refusal = Refusal(quota=charges[1].quota, cost=cost, wait_ms=wait_ms, charges=charges, standings=standings)
    return build_refusal(refusal)


@pytest.mark.parametrize(
    ("kind", "wait_ms", "error", "retry_after_s", "words"),
    [
        (
            "tokens_per_minute",
            1,
            RateLimitExceededError,
            1,
            "10 tokens a minute; 3 are left, and this request may need 4",
        ),
        ("tokens_per_minute", 1_001, RateLimitExceededError, 2, "try again in 2 s"),
        ("tokens_per_minute", None, RateLimitExceededError, 60, "ask for fewer"),
        ("requests_per_minute", 7_000, RateLimitExceededError, 7, "10 requests a minute, and has"),
        ("concurrent_requests", 1_000, RateLimitExceededError, 1, "10 requests at once, and as many run"),
        ("tokens_per_day", 86_000_001, QuotaExceededError, 86_001, "10 tokens a day"),
        ("tokens_per_month", None, QuotaExceededError, 86_000, "10 tokens a month, and this request alone may need 4"),
    ],
)
def test_a_refusal_says_how_long_to_wait(
    kind: str, wait_ms: int | None, error: type[Exception], retry_after_s: int, words: str
) -> None:
    found = refuse(kind, wait_ms, remaining=3, cost=4)
    problem = describe(found)
    assert (type(found), problem.status, problem.all_headers["retry-after"]) == (error, 429, str(retry_after_s))
    assert words in problem.message
    assert int(problem.all_headers["x-ratelimit-remaining-requests"]) in (3, 5)
    assert ("x-should-retry" in problem.all_headers) == (wait_ms is None)


@pytest.mark.parametrize(
    ("outcome", "code", "counts"),
    [
        ("ok", None, True),
        ("cancelled", None, True),
        ("lost", None, True),
        ("error", "invalid_request_error", True),
        ("error", "context_length_exceeded", True),
        ("error", "queue_full", False),
        ("error", "replica_failed", False),
        ("error", "draining", False),
        ("error", "internal_error", False),
        ("error", "a_code_that_nobody_knows", False),
        ("error", None, False),
    ],
)
def test_a_request_that_the_platform_failed_does_not_count(outcome: str, code: str | None, counts: bool) -> None:
    assert is_request(Settlement(outcome=outcome, code=code)) is counts
