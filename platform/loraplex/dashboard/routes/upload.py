"""Uploading a folder: the form, and the route that its files stream to, which takes what the API's route takes."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get, post
from litestar.params import FromPath

from loraplex.client.upload import OPTIONAL_FILES, REQUIRED_FILES
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.routes.adapters import WRITE, aim
from loraplex.dashboard.section import Desk, Section
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import get_identity, require_scope
from loraplex.gateway.problem import describe
from loraplex_registry.wire.adapter import Report

_PROMOTIONS = (
    ("auto", "If nothing is live", "It becomes live once it is ready, if the adapter has no live version."),
    ("always", "At once", "It becomes live once it is ready, unless somebody moves live meanwhile."),
    ("never", "Not now", "It is ready and can be called by its number; live stays where it is."),
)


def build_upload(desk: Desk) -> Section:
    """Return the page and its route."""
    console = desk.parts.adapters

    @get("/ui/upload")
    async def show_form(request: Request[Any, Any, Any]) -> Response[str]:
        identity = require_scope(request, WRITE)
        query = read_query(request, {"adapter"})
        tenant, _, adapter = query.get("adapter", "").rpartition("/")
        await desk.parts.names.ensure_fresh()
        tenants = None if identity.is_platform else (identity.tenant or "",)
        return desk.pages.show(
            request,
            "upload.html",
            tenant=identity.tenant or tenant,
            adapter=adapter,
            tenants=sorted(one.name for one in desk.parts.directory.tenants()) if identity.is_platform else [],
            adapters=desk.parts.names.adapters(tenants),
            bases=desk.parts.names.bases() if identity.is_admin else [],
            promotions=_PROMOTIONS,
            max_bytes=console.max_upload_bytes,
            known_files=[*REQUIRED_FILES, *OPTIONAL_FILES],
        )

    @post("/ui/upload/{tenant:str}/{adapter:str}", status_code=200, request_max_body_size=None)
    async def upload(request: Request[Any, Any, Any], tenant: FromPath[str], adapter: FromPath[str]) -> Response[str]:
        by = aim(desk, get_identity(request), tenant)
        try:
            status, view = await console.upload(by, adapter, request)
        except Exception as error:
            report = getattr(error, "report", None)
            if not isinstance(report, Report):
                raise
            return _show(desk, "_refused.html", 422, report=report, problem=describe(error))
        if getattr(view, "dry_run", False):
            return _show(desk, "_checked.html", 200, view=view, name=f"{tenant}/{adapter}")
        return _show(desk, "_uploaded.html", 200, view=view, is_new=status == 201)

    return Section(entries=[Entry("/ui/upload", "Upload", scope=WRITE)], handlers=[show_form, upload])


def _show(desk: Desk, template: str, status: int, **context: Any) -> Response[str]:
    text = desk.pages.render(template, **context)
    return Response(text, status_code=status, media_type="text/html", headers={"cache-control": "no-store"})
