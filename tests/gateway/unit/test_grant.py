"""What a key may be given: nobody gives more than they have."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from loraplex.errors import InvalidRequestError, PermissionDeniedError, UnsupportedParameterError
from loraplex.keys.grant import Allowance, build_allowance, check_allowance, check_values
from loraplex_registry.wire.identity import Identity

TEAM = Identity(
    role="tenant", tenant_id="t", tenant="team-x", scopes=("keys:write",), key_id="k", actor="ada", request_id="r"
)
ADMIN = Identity(role="admin", tenant_id=None, tenant=None, scopes=(), key_id="k", actor="root", request_id="r")
NARROW = Allowance(limits={"tokens_per_minute": 100, "concurrent_requests": 2}, priority=3)


@pytest.mark.parametrize(
    ("giver", "limits", "priority", "given"),
    [
        (Allowance(), None, None, Allowance(limits=None, priority=None)),
        (Allowance(), {"tokens_per_day": 5}, 2, Allowance(limits={"tokens_per_day": 5}, priority=2)),
        (NARROW, None, None, NARROW),
        (NARROW, {"tokens_per_minute": 50}, 8, Allowance({"tokens_per_minute": 50, "concurrent_requests": 2}, 8)),
        (NARROW, {"tokens_per_minute": None}, 0, Allowance({"concurrent_requests": 2}, 0)),
        (Allowance(priority=-4), None, None, Allowance(priority=0)),
    ],
)
def test_what_is_not_asked_for_is_the_giver_s_own(
    giver: Allowance, limits: dict[str, int | None] | None, priority: int | None, given: Allowance
) -> None:
    assert build_allowance(giver, limits, priority, None) == given


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (Allowance({"tokens_per_minute": 101, "concurrent_requests": 2}, 3), "limits.tokens_per_minute"),
        (Allowance({"tokens_per_minute": 100}, 3), "limits.concurrent_requests"),
        (Allowance(None, 3), "limits.tokens_per_minute"),
        (Allowance(NARROW.limits, 2), "priority"),
        (Allowance(NARROW.limits, None), "priority"),
    ],
)
def test_more_than_one_has_is_refused_but_to_admins(given: Allowance, param: str) -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        check_allowance(TEAM, NARROW, given)
    assert caught.value.param == param
    check_allowance(ADMIN, NARROW, given)


def test_no_key_makes_one_that_outlives_it() -> None:
    soon, later = datetime(2027, 1, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC)
    giver = Allowance(expires_at=soon)
    assert build_allowance(giver, None, None, None) == giver
    check_allowance(TEAM, giver, giver)
    check_allowance(TEAM, Allowance(), Allowance(expires_at=later))
    # its limits may be changed nevertheless
    check_allowance(TEAM, giver, Allowance(priority=1), before=Allowance())
    for longer in (Allowance(), Allowance(expires_at=later)):
        check_allowance(ADMIN, giver, longer)
        with pytest.raises(PermissionDeniedError) as caught:
            check_allowance(TEAM, giver, longer)
        assert caught.value.param == "expires_at"


def test_what_a_key_has_already_is_nobody_s_gift() -> None:
    first = Allowance({"tokens_per_day": 5}, -8)
    check_allowance(TEAM, NARROW, Allowance({"tokens_per_day": 9}, -8), before=first)
    check_allowance(TEAM, NARROW, Allowance({"tokens_per_day": 5, "tokens_per_minute": 100}, 3), before=first)
    for more in (
        Allowance({"tokens_per_day": 5, "tokens_per_minute": 101}, -8),
        Allowance({"tokens_per_day": 5}, -7),
    ):
        with pytest.raises(PermissionDeniedError):
            check_allowance(TEAM, NARROW, more, before=first)
    with pytest.raises(PermissionDeniedError):
        check_allowance(TEAM, NARROW, Allowance(None, 3), before=NARROW)


@pytest.mark.parametrize("own", [None, 0, -8])
def test_no_team_goes_before_the_others_by_its_own_word(own: int | None) -> None:
    check_allowance(TEAM, Allowance(priority=own), Allowance(priority=0))
    with pytest.raises(PermissionDeniedError):
        check_allowance(TEAM, Allowance(priority=own), Allowance(priority=-1))


@pytest.mark.parametrize("value", [0, -1, 2**53, 1.0, "5", True, [5]])
def test_a_limit_is_a_whole_number_from_1_on(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_values({"tokens_per_minute": value}, None)
    assert caught.value.param == "limits.tokens_per_minute"


def test_limits_and_priorities_have_names_and_ends() -> None:
    check_values({"requests_per_minute": 1, "tokens_per_month": 2**53 - 1, "concurrent_requests": None}, -8)
    for unknown in ("adapter_rank", "tokens_per_second", "x" * 1000):
        with pytest.raises(UnsupportedParameterError) as caught:
            check_values({unknown: 5}, None)
        assert caught.value.param == f"limits.{unknown[:64]}"
        assert len(caught.value.message) < 300
    for priority in (-9, 9):
        with pytest.raises(InvalidRequestError):
            check_values(None, priority)
