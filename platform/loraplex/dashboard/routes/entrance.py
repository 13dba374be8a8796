"""What anybody may ask for: the way in and out, and the files that pages are dressed with."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Request, Response, get, post
from litestar.params import FromPath

from loraplex.dashboard.asset import Assets
from loraplex.dashboard.cookie import build_cookie
from loraplex.dashboard.page import Pages
from loraplex.dashboard.session import LIFE, Sessions
from loraplex.dashboard.visit import called, get_visit
from loraplex.errors import AuthenticationError, LoraplexError, NotFoundError, TenantSuspendedError, UnavailableError
from loraplex.gateway.authentication import Authenticator
from loraplex.gateway.tries import TryLimit
from loraplex_registry.wire.identity import Identity

_HOME = "/ui/"
_LOGIN = "/ui/login"
_INSIDE = re.compile(r"/ui/(?!login)(?!/)[A-Za-z0-9/_@.:?=&%,+~-]{0,500}")
_NOT_STARTED = "This key opens nothing here; copy it again, whole, or ask for a new one."


def build_entrance(
    authenticator: Authenticator,
    freshen_keys: Callable[[], Awaitable[None]],
    sessions: Sessions,
    limit: TryLimit,
    pages: Pages,
    assets: Assets,
) -> list[Any]:
    """Return the routes."""

    @get("/")
    async def go_home() -> Response[bytes]:
        return Response(b"", status_code=302, headers={"location": _HOME})

    @get("/ui/static/{stamp:str}/{name:str}")
    async def send_asset(request: Request[Any, Any, Any], stamp: FromPath[str], name: FromPath[str]) -> Response[bytes]:
        asset, cache_control = assets.get(stamp, name)
        headers = {"cache-control": cache_control, "vary": "accept-encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(asset.content, headers=headers, media_type=asset.media_type)
        return Response(asset.packed, headers=headers | {"content-encoding": "gzip"}, media_type=asset.media_type)

    @post("/ui/logout", status_code=303)
    async def log_out(request: Request[Any, Any, Any]) -> Response[bytes]:
        visit = get_visit(request)
        await sessions.close(visit.session, visit.identity)
        cookie = build_cookie(*called(request), "", 0)
        headers = {"location": _LOGIN, "set-cookie": cookie}
        return Response(b"", status_code=303, headers=headers)

    @get("/ui/{rest:path}")
    async def refuse() -> None:
        raise NotFoundError("There is no such page; the menu shows those that there are.")

    login = _build_login(authenticator, freshen_keys, sessions, limit, pages)
    return [go_home, send_asset, *login, log_out, refuse]


def _build_login(
    authenticator: Authenticator,
    freshen_keys: Callable[[], Awaitable[None]],
    sessions: Sessions,
    limit: TryLimit,
    pages: Pages,
) -> list[Any]:
    @get(_LOGIN)
    async def show_login(request: Request[Any, Any, Any]) -> Response[str]:
        notice = "Your session has ended." if "ended" in request.query_params else None
        return _show_login(request, pages, request.query_params.get("next"), notice=notice)

    @post(_LOGIN, status_code=303)
    async def log_in(request: Request[Any, Any, Any]) -> Response[Any]:
        form = await request.form()
        key, address = _read(form, "key").strip(), request.client.host if request.client else ""
        if (wait_s := await limit.find_wait_s(address, key)) is not None:
            problem = f"Too many tries: {limit.max_tries} a minute are allowed. Try again in {wait_s} s."
            headers = {"retry-after": str(wait_s)}
            return _show_login(request, pages, _read(form, "next"), 429, problem=problem, headers=headers)
        try:
            await freshen_keys()
            token = await sessions.open(_identify(authenticator, key, request))
        except UnavailableError as error:
            return _show_login(request, pages, _read(form, "next"), 503, problem=error.message)
        except LoraplexError as error:
            await limit.note_failure(address, key)
            return _show_login(request, pages, _read(form, "next"), 401, problem=error.message)
        cookie = build_cookie(*called(request), token, int(LIFE.total_seconds()))
        location = _check_next(_read(form, "next"))
        return Response(b"", status_code=303, headers={"location": location, "set-cookie": cookie})

    return [show_login, log_in]


def _identify(authenticator: Authenticator, key: str, request: Request[Any, Any, Any]) -> Identity:
    """Return whom a key stands for.

    Raises:
        AuthenticationError: Nobody.
        TenantSuspendedError: A tenant that is suspended.
    """
    try:
        return authenticator.authenticate(f"Bearer {key}", request.state.request_id)
    except TenantSuspendedError:
        raise
    except AuthenticationError as error:
        if error.message == AuthenticationError().message:
            raise AuthenticationError(_NOT_STARTED) from error
        raise


def _show_login(
    request: Request[Any, Any, Any],
    pages: Pages,
    wanted: str | None,
    status: int = 200,
    *,
    headers: dict[str, str] | None = None,
    problem: str | None = None,
    notice: str | None = None,
) -> Response[str]:
    """Return the form; a key that was typed is never sent back."""
    context = {"wanted": _check_next(wanted), "problem": problem, "notice": notice}
    return pages.show(request, "login.html", status, headers, **context)


def _check_next(wanted: str | None) -> str:
    """Return where to go after the login: a page of ours, whatever was asked for."""
    return wanted if wanted is not None and _INSIDE.fullmatch(wanted) else _HOME


def _read(form: Any, name: str) -> str:
    value = form.get(name, "")
    return value if isinstance(value, str) else ""
