"""Usage and what it costs: sums of settled requests by tenant, adapter, version, key and day; as a table and as CSV."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from litestar import Request, Response, get

from loraplex.dashboard.menu import Entry
from loraplex.dashboard.section import Desk, Section
from loraplex.errors import InvalidRequestError
from loraplex.gateway.body import parse_time
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import require_scope
from loraplex.gateway.routes.usage import read_tenant_id
from loraplex.usage.report import GROUPS, UsageQuery, sum_usage
from loraplex.usage.spreadsheet import write_csv
from loraplex_registry.wire.identity import Identity

_SCOPE = "usage:read"
_DAYS_SHOWN = 30
_BYS = (
    ("tenant", "Tenant"),
    ("tenant,adapter", "Adapter"),
    ("tenant,adapter,version", "Version"),
    ("tenant,key", "Key"),
    ("day", "Day"),
    ("day,tenant", "Day and tenant"),
    ("day,tenant,adapter", "Day and adapter"),
)
PRICES = (("price_read", "prompt_tokens"), ("price_cached", "cached_tokens"), ("price_answered", "completion_tokens"))
"""Prices of a million tokens, as the page's form names them, and the column that each is of."""

_PRICE = re.compile(r"\d{1,6}(\.\d{1,6})?")
_SUMMED = (
    "requests",
    "requests_error",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "load_bytes",
    "decode_s",
)
_MILLION = 1_000_000


def build_usage(desk: Desk) -> Section:
    """Return the page and its rows as CSV."""
    parts = desk.parts

    @get("/ui/usage")
    async def show_usage(request: Request[Any, Any, Any]) -> Response[str]:
        identity, fields = require_scope(request, _SCOPE), _read_fields(request)
        prices = read_prices(fields)
        rows = await sum_usage(parts.database, _build_query(fields, identity, parts.directory))
        if prices:
            rows = [row | {"cost": price_row(row, prices)} for row in rows]
        total = {name: sum(row[name] for row in rows) for name in (*_SUMMED, *(("cost",) if prices else ()))}
        return desk.pages.show(
            request,
            "usage.html",
            rows=rows,
            total=total,
            fields=fields,
            bys=_list_bys(identity),
            groups=fields["group_by"].split(","),
            prices=prices,
            csv_address=f"/ui/usage.csv?{urlencode(fields)}",
        )

    @get("/ui/usage.csv")
    async def send_csv(request: Request[Any, Any, Any]) -> Response[bytes]:
        identity, fields = require_scope(request, _SCOPE), _read_fields(request)
        prices = read_prices(fields)
        rows = await sum_usage(parts.database, _build_query(fields, identity, parts.directory))
        if prices:
            rows = [row | {"cost": round(price_row(row, prices), 6)} for row in rows]
        file = io.StringIO()
        write_csv(file, rows, fields["group_by"].split(","))
        headers = {"content-disposition": 'attachment; filename="usage.csv"', "cache-control": "no-store"}
        return Response(file.getvalue().encode(), headers=headers, media_type="text/csv")

    return Section(entries=[Entry("/ui/usage", "Usage", scope=_SCOPE)], handlers=[show_usage, send_csv])


def read_prices(fields: Mapping[str, str]) -> dict[str, float]:
    """Return the prices that are given, by the column that each is of.

    Raises:
        InvalidRequestError: One is no amount.
    """
    found = {}
    for name, column in PRICES:
        text = fields.get(name, "")
        if text and not _PRICE.fullmatch(text):
            raise InvalidRequestError(f"{name} is an amount such as 0.25", param=name)
        if text:
            found[column] = float(text)
    return found


def price_row(row: Mapping[str, Any], prices: Mapping[str, float]) -> float:
    """Return what a row costs: cached tokens at their own price if they have one, else as those that are read."""
    read, cached = row["prompt_tokens"], row["cached_tokens"]
    price_read = prices.get("prompt_tokens", 0.0)
    cost = (read - cached) * price_read + cached * prices.get("cached_tokens", price_read)
    return float(cost + row["completion_tokens"] * prices.get("completion_tokens", 0.0)) / _MILLION


def _read_fields(request: Request[Any, Any, Any]) -> dict[str, str]:
    """The fields of the form, where nothing is said those of the last 30 days; empty ones are absent."""
    known = {"tenant", "from", "to", "group_by", *(name for name, _ in PRICES)}
    given = {name: value.strip() for name, value in read_query(request, known).items() if value.strip()}
    first = (datetime.now(UTC) - timedelta(days=_DAYS_SHOWN - 1)).date().isoformat()
    return {"from": first, "group_by": "tenant,adapter"} | given


def _build_query(fields: Mapping[str, str], identity: Identity, directory: Directory) -> UsageQuery:
    groups = fields["group_by"].split(",")
    if any(name not in GROUPS or groups.count(name) > 1 for name in groups):
        raise InvalidRequestError(f"group_by is a list of {','.join(GROUPS)}", param="group_by")
    stop = parse_time(fields["to"], "to") if "to" in fields else None
    return UsageQuery(
        tenant_id=read_tenant_id(fields.get("tenant"), identity, directory),
        start=parse_time(fields["from"], "from"),
        # the last day belongs to it
        stop=None if stop is None else stop + timedelta(days=1),
        group_by=groups,
    )


def _list_bys(identity: Identity) -> Sequence[tuple[str, str]]:
    return _BYS if identity.is_platform else [(by, text) for by, text in _BYS if "tenant" not in text.lower()]
