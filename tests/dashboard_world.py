"""A browser without a screen for tests of the dashboard: cookies, the form of the login, the parts of a page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import httpx

from gateway_world import ADMIN_KEY, GatewayWorld

ORIGIN = "http://gateway"


class Browser:
    """One browser at the dashboard of a world; what it sends comes from a page of ours unless told."""

    def __init__(self, world: GatewayWorld) -> None:
        self._world = world
        self.cookie: str | None = None

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask for a page."""
        return await self._send("GET", path, headers)

    async def post(self, path: str, fields: dict[str, str] | None = None, **headers: str) -> httpx.Response:
        """Send a form."""
        return await self._send("POST", path, {"origin": ORIGIN} | headers, data=fields or {})

    async def log_in(self, key: str = ADMIN_KEY, **fields: str) -> httpx.Response:
        """Log in with a key and return the answer."""
        return await self.post("/ui/login", {"key": key} | fields)

    async def _send(self, method: str, path: str, headers: dict[str, str], **options: Any) -> httpx.Response:
        headers = {"accept": "text/html", "host": "gateway"} | {
            name.replace("_", "-"): value for name, value in headers.items() if value
        }
        if self.cookie:
            headers["cookie"] = self.cookie
        response = await self._world.http.request(method, path, headers=headers, **options)
        # by hand, as it is secure and the test has no TLS
        self._world.http.cookies.clear()
        if "set-cookie" in response.headers:
            pair, _, attributes = response.headers["set-cookie"].partition("; ")
            self.cookie = None if "Max-Age=0" in attributes else pair
        return response


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read_tags(html: str) -> list[tuple[str, dict[str, str | None]]]:
    """All tags of a page with their attributes."""
    reader = _Reader()
    reader.feed(html)
    return reader.tags


def read_text(html: str) -> str:
    """What a page says, as one line."""
    reader = _Reader()
    reader.feed(html)
    return " ".join(" ".join(reader.texts).split())


def find_unsafe(html: str) -> list[tuple[str, dict[str, str | None]]]:
    """Tags that the page's own policy would stop, or that run what they hold."""
    return [
        (tag, attributes)
        for tag, attributes in read_tags(html)
        if tag in ("style", "iframe", "object", "embed")
        or (tag == "script" and not (attributes.get("src") or "").startswith("/ui/static/"))
        or any(name == "style" or name.startswith("on") for name in attributes)
        or any((value or "").strip().lower().startswith(("javascript:", "data:")) for value in attributes.values())
    ]
