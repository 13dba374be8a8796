"""Makes pages: templates with their surroundings, headers that every page has, errors as pages.

Every text goes into a page escaped, whoever wrote it; a name that a template does not know is a mistake of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Request, Response

from loraplex.dashboard.asset import Assets
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.shown import FILTERS
from loraplex.dashboard.visit import find_identity, get_address, wants_json
from loraplex.gateway.problem import describe
from loraplex.version import __version__
from loraplex_registry.wire.identity import Identity

HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    # not `no-referrer`: browsers would hide the origin of forms, too
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""What every answer of the dashboard has."""

_NOT_KEPT = {"cache-control": "no-store"}


class Pages:
    """Renders; `entries` is the whole menu, filled once the routes are known.

    Args:
        assets: What pages load.
        name_key: What the key of whoever asks is called, None if that is not known.
    """

    def __init__(self, assets: Assets, name_key: Callable[[Identity], str | None]) -> None:
        self._name_key = name_key
        self.entries: Sequence[Entry] = ()
        self._environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters |= FILTERS
        self._environment.globals |= {"asset": assets.find_url, "version": __version__}

    def render(self, template: str, **context: Any) -> str:
        """Return the text of a template without the surroundings of a page, for parts that are sent alone."""
        return self._environment.get_template(template).render(context)

    def show(
        self, request: Request[Any, Any, Any], template: str, status: int = 200, headers: Any = None, **context: Any
    ) -> Response[str]:
        """Return the page that a template makes, with menu and head, for whoever asks."""
        identity = find_identity(request)
        entries = () if identity is None else [entry for entry in self.entries if entry.is_for(identity)]
        key = None if identity is None else self._name_key(identity)
        text = self.render(template, me=identity, key=key, entries=entries, path=request.url.path, **context)
        return Response(text, status_code=status, headers=_NOT_KEPT | (headers or {}), media_type="text/html")

    def show_bare(
        self, request: Request[Any, Any, Any], template: str, status: int = 200, **context: Any
    ) -> Response[str]:
        """Return a page for somebody who is not logged in."""
        return self.show(request, template, status, **context)

    def show_error(self, request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
        """Return an error as a page, or as JSON to a script; both say no more than the API does."""
        problem = describe(error)
        headers = _NOT_KEPT | problem.all_headers
        if wants_json(request):
            return Response(
                problem.encode(), status_code=problem.status, headers=headers, media_type="application/json"
            )
        again = get_address(request) if request.method == "GET" else None
        return self.show(
            request,
            "error.html",
            problem.status,
            problem.all_headers,
            problem=problem,
            request_id=request.scope["state"].get("request_id", ""),
            again=again if problem.status == 429 or problem.status >= 500 else None,
        )
