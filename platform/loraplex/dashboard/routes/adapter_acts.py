"""Changing adapters: a question before each act, and the act itself, which a page that saw another state cannot do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from litestar import Request, Response, get, post
from litestar.params import FromPath

from loraplex.dashboard.adapter_act import (
    LIVE,
    Act,
    Question,
    Subject,
    ask,
    check_act,
    needs_version,
)
from loraplex.dashboard.routes.adapters import aim, read_number
from loraplex.dashboard.section import Desk, Section
from loraplex.errors import InvalidRequestError
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import get_identity
from loraplex_registry.wire.adapter import Target
from loraplex_registry.wire.identity import Identity

_ASK = "/ui/adapters/{tenant:str}/{adapter:str}/ask/{act:str}"
_DO = "/ui/adapters/{tenant:str}/{adapter:str}/do/{act:str}"
_STALE = "precondition_failed"
_WEIGHT = re.compile(r"weight-([1-9][0-9]{0,9})")
_MAX_SHOWN = 50
_VERB_TO_DONE: dict[Act, str] = {
    "promote": "{called} leads to version {version}.",
    "weigh": "{called} is divided as you said.",
    "roll-back": "{called} leads to where it led before.",
    "unset": "The alias {alias} is deleted.",
    "retire": "Version {version} is retired.",
    "restore": "Version {version} can be called again.",
    "quarantine": "Version {version} is quarantined.",
    "release": "Version {version} is released.",
    "make-default": "{name} is the default.",
    "delete": "{name} is deleted.",
}


def build_adapter_acts(desk: Desk) -> Section:
    """Return the routes."""

    @get(_ASK)
    async def ask_first(
        request: Request[Any, Any, Any], tenant: FromPath[str], adapter: FromPath[str], act: FromPath[str]
    ) -> Response[str]:
        by = aim(desk, get_identity(request), tenant)
        query = read_query(request, {"version", "alias"})
        subject = await _find_subject(desk, by, adapter, check_act(act), query)
        return await _show(desk, by, check_act(act), subject)

    @post(_DO, status_code=200)
    async def do(
        request: Request[Any, Any, Any], tenant: FromPath[str], adapter: FromPath[str], act: FromPath[str]
    ) -> Response[Any]:
        by = aim(desk, get_identity(request), tenant)
        found, form = check_act(act), await _read_form(request)
        try:
            await _act(desk, by, adapter, found, form)
        except Exception as error:
            if getattr(error, "code", None) != _STALE:
                raise
            # somebody was faster: what is there now is shown, and who it was, and the same is offered again
            subject = await _find_subject(desk, by, adapter, found, form)
            return await _show(desk, by, found, subject, form=form, is_stale=True)
        return _go_on(tenant, adapter, found, form)

    return Section(handlers=[ask_first, do])


async def _find_subject(desk: Desk, by: Identity, adapter: str, act: Act, asked: Mapping[str, str]) -> Subject:
    """Return what an act is about, as it is now."""
    console, alias_name = desk.parts.adapters, asked.get("alias") or LIVE
    version = None
    if needs_version(act):
        version, _ = await console.show_version(by, adapter, read_number(asked.get("version", "")))
    aliases = {alias.alias: alias for alias in await console.list_aliases(by, adapter)}
    is_set = alias_name in aliases
    return Subject(
        adapter=await console.show(by, adapter),
        version=version,
        alias_name=alias_name,
        alias=aliases.get(alias_name),
        changes=await console.list_changes(by, adapter, alias_name) if is_set else [],
        purge_after_days=console.purge_after_days,
    )


async def _show(
    desk: Desk,
    by: Identity,
    act: Act,
    subject: Subject,
    *,
    form: Mapping[str, str] | None = None,
    is_stale: bool = False,
) -> Response[str]:
    question: Question = ask(act, subject)
    weights: list[tuple[int, str, int]] = []
    if act == "weigh":
        weights = await _list_weights(desk, by, subject, form)
    text = desk.pages.render(
        "_ask.html",
        act=act,
        question=question,
        subject=subject,
        weights=weights,
        is_new=act == "weigh" and subject.alias is None,
        stale=subject.changes[0] if is_stale and subject.changes else None,
        is_stale=is_stale,
        path=f"/ui/adapters/{subject.adapter.tenant}/{subject.adapter.name}/do/{act}",
    )
    return Response(text, media_type="text/html", headers={"cache-control": "no-store"})


async def _list_weights(
    desk: Desk, by: Identity, subject: Subject, form: Mapping[str, str] | None
) -> list[tuple[int, str, int]]:
    """Return versions that may get a share, newest first, with their states and what each has, or was to have."""
    versions, _ = await desk.parts.adapters.list_versions(by, subject.adapter.name, _MAX_SHOWN, None)
    wanted = {target.version: target.weight for target in (subject.alias.targets if subject.alias else ())}
    if form is not None:
        wanted = {target.version: target.weight for target in _read_weights(form)}
    shown = {version.version: version.state for version in versions if version.state == "ready"}
    shown |= {number: shown.get(number, "not ready") for number in wanted}
    return [(number, shown[number], wanted.get(number, 0)) for number in sorted(shown, reverse=True)]


async def _act(desk: Desk, by: Identity, adapter: str, act: Act, form: Mapping[str, str]) -> None:
    console = desk.parts.adapters
    if act == "promote":
        target = Target(read_number(form.get("version", "")), 100)
        await console.move_alias(by, adapter, LIVE, (target,), _read_revision(form))
    elif act == "weigh":
        await console.move_alias(by, adapter, form.get("alias", ""), _read_weights(form), _read_revision(form))
    elif act in ("roll-back", "unset"):
        revision = _read_revision(form)
        if revision is None:
            raise InvalidRequestError("revision is required", param="revision")
        move = console.roll_back if act == "roll-back" else console.delete_alias
        await move(by, adapter, form.get("alias", ""), revision)
    elif act == "make-default":
        await console.make_default(by, adapter)
    elif act == "delete":
        if form.get("typed") != adapter:
            raise InvalidRequestError(f"Type {adapter} to delete it.", param="typed")
        await console.delete(by, adapter)
    else:
        changes: dict[str, Any] = {
            "retire": console.retire,
            "restore": console.restore,
            "quarantine": console.quarantine,
            "release": console.release,
        }
        await changes[act](by, adapter, read_number(form.get("version", "")))


def _go_on(tenant: str, adapter: str, act: Act, form: Mapping[str, str]) -> Response[Any]:
    """Say what was done, and let the page show what is there now."""
    alias = form.get("alias") or LIVE
    name = f"{tenant}/{adapter}"
    called = name if alias == LIVE else f"{name}@{alias}"
    text = _VERB_TO_DONE[act].format(name=name, called=called, alias=alias, version=form.get("version", ""))
    back = "/ui/adapters" if act == "delete" else _check_back(form.get("back", ""), f"/ui/adapters/{name}")
    place = {"path": back, "target": "#main", "select": "#main > *", "swap": "innerHTML"}
    headers = {
        "hx-trigger": json.dumps({"toast": {"text": text, "tone": "ok"}}),
        "hx-location": json.dumps(place),
        "cache-control": "no-store",
    }
    return Response(b"", status_code=200, headers=headers)


def _check_back(back: str, page: str) -> str:
    """Where the reader was, if that is a page of this adapter."""
    return back if back.startswith(f"{page}/versions/") and back.isascii() and back.isprintable() else page


async def _read_form(request: Request[Any, Any, Any]) -> dict[str, str]:
    form = await request.form()
    return {name: value for name, value in form.items() if isinstance(value, str)}


def _read_revision(form: Mapping[str, str]) -> int | None:
    """Return the revision that was seen; an alias that was not set has none."""
    text = form.get("revision", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequestError("revision is a number", param="revision")
    return int(text)


def _read_weights(form: Mapping[str, str]) -> tuple[Target, ...]:
    """Return the shares that were given; those of 0 are none.

    Raises:
        InvalidRequestError: One is no whole number of percent.
    """
    found = []
    for name, text in form.items():
        match = _WEIGHT.fullmatch(name)
        if match is None or not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) <= 3):
            raise InvalidRequestError(f"The weight of version {match[1]} is a whole number of percent", param=name)
        if int(text):
            found.append(Target(int(match[1]), int(text)))
    return tuple(sorted(found, key=lambda one: one.version))
