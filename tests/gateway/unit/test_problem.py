"""One body for every error, one table of statuses."""

from __future__ import annotations

import json

import pytest
from litestar.exceptions import MethodNotAllowedException, NotFoundException

from loraplex import errors
from loraplex.gateway.problem import CODE_TO_STATUS, describe
from loraplex.settings import Settings


def all_errors() -> list[type[errors.LoraplexError]]:
    found = [errors.LoraplexError]
    for cls in found:
        found += cls.__subclasses__()
    return found


def test_every_error_that_can_reach_a_client_has_a_status_and_says_what_to_do() -> None:
    for cls in all_errors():
        assert cls().message
        if not issubclass(cls, errors.StartError):
            assert cls.code in CODE_TO_STATUS, cls


def test_errors_are_told_in_ascii_whatever_clients_wrote() -> None:
    body = describe(errors.InvalidRequestError("ü \ud83d", param="\ud83d")).encode()
    assert body.isascii()
    assert json.loads(body)["error"]["param"] == "\ud83d"


def test_every_error_is_in_the_tree_of_the_module() -> None:
    assert all(cls.__name__ in (errors.__doc__ or "") for cls in all_errors())


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.AuthenticationError(), 401, "authentication_error"),
        (errors.PermissionDeniedError(), 403, "permission_error"),
        (errors.ModelNotFoundError(param="model"), 404, "invalid_request_error"),
        (errors.NoReplicaError(), 503, "server_error"),
    ],
)
def test_the_body_has_one_shape(error: errors.LoraplexError, status: int, kind: str) -> None:
    problem = describe(error)
    assert problem.status == status
    assert problem.body == {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def test_unavailable_answers_say_when_to_come_back() -> None:
    assert describe(errors.AdapterLoadingError()).all_headers["retry-after"] == "1"
    assert describe(errors.AuthenticationError()).all_headers["www-authenticate"] == "Bearer"


def test_the_frameworks_own_refusals_have_the_shape_too() -> None:
    assert describe(NotFoundException()).body["error"]["code"] == "not_found"
    problem = describe(MethodNotAllowedException(headers={"allow": "GET"}))
    assert (problem.status, problem.code, problem.all_headers) == (405, "method_not_allowed", {"allow": "GET, HEAD"})


def test_what_nobody_expected_shows_nothing_of_itself() -> None:
    problem = describe(ValueError("secret detail"))
    assert (problem.status, problem.code) == (500, "internal_error")
    assert "secret" not in problem.message


def test_settings_show_no_secret() -> None:
    settings = Settings(
        database_url="postgresql+psycopg://u:db-password@h/d",
        object_store_url="file:///x",
        admin_key="the-admin-key",
        signing_key="the-signing-key",
        key_pepper="the-pepper",
        engine_key="the-engine-key",
    )
    shown = repr(settings)
    assert not any(secret in shown for secret in ("db-password", "admin-key", "signing-key", "pepper", "engine-key"))
