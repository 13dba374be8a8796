"""Puts the dashboard together: an application of its own, so that no key and no cookie meets the other's door."""

from __future__ import annotations

from litestar import Litestar
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.dashboard.asset import Assets
from loraplex.dashboard.board import Board
from loraplex.dashboard.door import SessionDoor
from loraplex.dashboard.key_name import name_key
from loraplex.dashboard.live import Streams
from loraplex.dashboard.lookout import Lookout
from loraplex.dashboard.page import HEADERS, Pages
from loraplex.dashboard.parts import Parts
from loraplex.dashboard.routes.adapter_acts import build_adapter_acts
from loraplex.dashboard.routes.adapters import build_adapters
from loraplex.dashboard.routes.audit import build_audit
from loraplex.dashboard.routes.capacity import build_capacity
from loraplex.dashboard.routes.entrance import build_entrance
from loraplex.dashboard.routes.escalations import build_escalations
from loraplex.dashboard.routes.limits import build_limits
from loraplex.dashboard.routes.overview import build_overview
from loraplex.dashboard.routes.playground import build_playground
from loraplex.dashboard.routes.slots import build_slots
from loraplex.dashboard.routes.upload import build_upload
from loraplex.dashboard.routes.usage import build_usage
from loraplex.dashboard.section import Desk, Section
from loraplex.dashboard.session import Sessions

_MAX_FORM_BYTES = 256 << 10
_RAW_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def build_dashboard(parts: Parts) -> Litestar:
    """Return the application that answers `/` and everything below `/ui/`."""
    assets = Assets()
    pages = Pages(assets, lambda identity: name_key(parts.directory, identity.key_id, identity))
    sessions = Sessions(parts.database)
    door = SessionDoor(sessions, parts.authenticator, parts.freshen_keys, pages)
    board = Board(parts.database, parts.stats)
    desk = Desk(
        parts=parts,
        pages=pages,
        streams=Streams(door, parts.drain),
        board=board,
        lookout=Lookout(parts, board),
    )
    # in the order of the menu
    sections: list[Section] = [
        build_overview(desk),
        build_adapters(desk),
        build_adapter_acts(desk),
        build_upload(desk),
        build_playground(desk),
        build_escalations(desk),
        build_capacity(desk),
        build_slots(desk),
        build_usage(desk),
        build_limits(desk),
        build_audit(desk),
    ]
    pages.entries = [entry for section in sections for entry in section.entries]
    entrance = build_entrance(parts.authenticator, parts.freshen_keys, sessions, parts.logins, pages, assets)
    return Litestar(
        route_handlers=[*entrance, *(handler for section in sections for handler in section.handlers)],
        middleware=[door],
        exception_handlers={HTTPException: pages.show_error, Exception: pages.show_error},
        request_max_body_size=_MAX_FORM_BYTES,
        openapi_config=None,
        logging_config=None,
    )


class Fork:
    """Sends what is for people to the dashboard, whose answers all have its headers, and everything else to the API."""

    def __init__(self, app: ASGIApp, dashboard: ASGIApp) -> None:
        self._app = app
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["path"] not in ("/", "/ui") and not scope["path"].startswith("/ui/"):
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_RAW_HEADERS]
            await send(message)

        await self._dashboard(scope, receive, send_safely)
