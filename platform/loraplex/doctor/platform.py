"""What a running platform says of itself, to any key: the only check that a machine with URL and key alone needs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError, ConnectionFailedError
from loraplex.doctor.finding import Finding, judge_clock
from loraplex.doctor.patient import Patient

_SKEW_WARN_S, _SKEW_FAIL_S = 5.0, 60.0
_OWN_FAULT = "operator"


def check_platform(patient: Patient) -> Iterator[Finding]:
    """Ask the gateway, as far as the key goes."""
    location = patient.location
    if location is None:
        yield Finding("platform.reachable", "skip", "No platform runs here, and LORAPLEX_URL names no other.")
        return
    with Connection(location) as connection:
        connection.http.timeout = httpx.Timeout(patient.limit_s / 2)
        try:
            yield from _ask(connection, has_key=location.key is not None)
        except ConnectionFailedError as error:
            yield Finding("platform.reachable", "fail", error.message, "Start the gateway, or correct LORAPLEX_URL.")


def _ask(connection: Connection, *, has_key: bool) -> Iterator[Finding]:
    before = time.time()
    answer = connection.send("GET", "/healthz")
    middle = (before + time.time()) / 2
    yield Finding("platform.reachable", "ok", f"{connection.url} answers.")
    if "date" in answer.headers:
        # the header has whole seconds
        ahead_s = parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5 - middle
        yield judge_clock(
            "platform.clock",
            ahead_s,
            whose="The gateway's clock",
            warn_s=_SKEW_WARN_S,
            fail_s=_SKEW_FAIL_S,
            why="dates of keys, reviews and usage are taken from it",
        )
    yield _ask_ready(connection)
    if not has_key:
        remedy = "Set LORAPLEX_API_KEY to an admin's key."
        yield Finding("platform.fleet", "skip", "Without a key the platform says nothing of its engines.", remedy)
        return
    yield from _ask_fleet(connection)


def _ask_ready(connection: Connection) -> Finding:
    try:
        connection.send("GET", "/readyz")
    except ClientError as error:
        if isinstance(error, ConnectionFailedError):
            raise
        remedy = (
            "Run doctor on the gateway's machine, with its settings: database or migrations are not as they must be."
        )
        return Finding("platform.ready", "fail", f"The gateway is not ready: {error.message}", remedy)
    return Finding("platform.ready", "ok", "The gateway is ready: database and names are there.")


def _ask_fleet(connection: Connection) -> Iterator[Finding]:
    try:
        fleet: dict[str, Any] = connection.send("GET", "/api/v1/fleet").json()
    except ClientError as error:
        if error.status == httpx.codes.UNAUTHORIZED:
            remedy = "Set LORAPLEX_API_KEY to a key that is valid there."
            yield Finding("platform.key", "fail", f"The platform refuses the key: {error.message}", remedy)
        elif error.status == httpx.codes.FORBIDDEN:
            yield Finding("platform.fleet", "skip", "A tenant's key is told nothing of engines; use an admin's.")
        else:
            yield Finding("platform.fleet", "fail", error.message, "Look at the gateway's log.")
        return
    yield Finding("platform.key", "ok", "The key is valid.")
    if not fleet["data"]:
        yield Finding("platform.fleet", "warn", "The gateway knows no engine.", "Name engines in LORAPLEX_POOLS.")
    for engine in fleet["data"]:
        yield from _judge_engine(engine)
    for one in fleet.get("differences", ()):
        what = f"{one['subject']} should be {one['desired']} and is {one['actual']}."
        remedy = "The platform works on it." if one.get("is_repaired_by") != _OWN_FAULT else "Only you can end it."
        yield Finding("platform.differences", "warn", what, remedy, str(one["subject"]))
    yield from _compare_weights(fleet["data"])


def _judge_engine(engine: dict[str, Any]) -> Iterator[Finding]:
    url, pool = engine["url"], engine.get("pool", "")
    if engine["serves"]:
        yield Finding(
            "platform.engine", "ok", f"{url} serves {engine.get('base') or engine.get('model')}.", subject=pool
        )
    else:
        why = f"{url} gets no traffic: {engine.get('problem') or 'it was not asked yet'}."
        yield Finding("platform.engine", "fail", why, "Look at the engine's log; run doctor there.", pool)
    model = engine.get("state", {}).get("model") or {}
    if model.get("ops") == "torch":
        why = f"{url} runs without compiled ops, several times slower: {model.get('ops_reason', 'no reason')}"
        yield Finding("engines.ops", "warn", why, "Install g++ on the engine's machine, and start it again.", pool)


def _compare_weights(engines: list[dict[str, Any]]) -> Iterator[Finding]:
    pools: dict[str, set[str]] = {}
    for engine in engines:
        weights = (engine.get("state", {}).get("model") or {}).get("weights_digest")
        if weights:
            pools.setdefault(engine.get("pool", ""), set()).add(weights)
    for pool, kinds in pools.items():
        if len(kinds) > 1:
            why = f"Engines of {pool} have {len(kinds)} different weights of their base."
            yield Finding("engines.weights", "fail", why, "Serve the same files on all engines of a pool.", pool)
