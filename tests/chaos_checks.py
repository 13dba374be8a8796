"""What must hold beside and after every fault, held against the books of the clients, the API and the rows."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx
import sqlalchemy as sa

from chaos_books import CUT, GONE, Answer, Books, Change
from chaos_clients import FRESH, MOVED, Clients
from chaos_fault import COLD, Fault
from chaos_reference import NUM_TOKENS, Reference
from loraplex.db.database import Database
from loraplex.db.tables import request, usage

SETTLED_S = 40.0
"""Until then what a dead gateway left open is settled by another one, which begins after six seconds."""
_PAGE = 200


@dataclass(frozen=True)
class Since:
    """How far the books had come when a fault began."""

    answers: int
    changes: int
    acts: int
    key_ids: int
    versions: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, books: Books) -> Since:
        """Where the books are now."""
        return cls(
            len(books.answers), len(books.changes), len(books.acts), len(books.key_ids), frozenset(books.versions)
        )


@dataclass(frozen=True)
class Span:
    """When a fault was there, until everything was as before."""

    began_at: float
    ended_at: float


def check_answers(books: Books, since: Since, reference: Reference) -> None:
    """Each answer comes from a content that its model led to when it was asked, and says what that says alone."""
    for answer in books.answers[since.answers :]:
        if answer.digest is None:
            assert answer.end != "ok", answer
            continue
        is_base = "/" not in answer.model
        allowed = {"base"} if is_base else books.allowed(answer.model, answer.began_at, answer.told_at)
        assert answer.digest in allowed, (answer, allowed)
        whole = reference.texts[answer.digest][answer.prompt]
        for text in answer.texts:
            assert text == whole if answer.end == "ok" else whole.startswith(text), (answer, whole)
        if answer.end == "ok":
            assert answer.num_tokens == NUM_TOKENS * len(answer.texts), answer


def check_ends(books: Books, since: Since, fault: Fault, span: Span, victim: str, cold_until: float) -> None:
    """Only what ran beside the fault failed, as it may then, and all ended in time.

    Until `cold_until` an engine may refuse what an earlier fault kept it from loading.
    """
    for answer in books.answers[since.answers :]:
        assert answer.ended_at - answer.began_at < fault.longest_s, answer
        allowed = {"ok", GONE} | (COLD if answer.began_at < cold_until else set())
        if answer.began_at < span.ended_at and span.began_at < answer.ended_at:
            allowed |= fault.ends | ({CUT} if fault.is_cut and answer.gateway == victim else set())
        assert answer.end in allowed, (answer, allowed)
    for act in books.acts[since.acts :]:
        assert act.ended_at - act.began_at < fault.longest_s, act
        allowed = {"ok"}
        if act.began_at < span.ended_at and span.began_at < act.ended_at:
            allowed |= fault.act_ends | ({CUT} if fault.is_cut and act.gateway == victim else set())
        assert act.end in allowed, (act, allowed)


async def check_kept(clients: Clients, since: Since) -> None:
    """Every move, version and key that was acknowledged is there, at every gateway, and so is the event of each."""
    books = clients.books
    moves = [change for change in books.changes[since.changes :] if change.model == MOVED and change.acknowledged_at]
    versions = {key: digest for key, digest in books.versions.items() if key not in since.versions}
    async with clients.client() as client:
        for url in clients.urls:
            told = await _list(clients, client, url, clients.path(MOVED, "/aliases/live/history"))
            revisions = [item["revision"] for item in told]
            assert revisions == list(range(revisions[0], revisions[0] - len(revisions), -1)), "a gap or a fork"
            found = {item["revision"]: item["targets"][0]["version"] for item in told}
            for move in moves:
                assert found.get(move.revision, move.number) == move.number, (move, told)
            shown = await _list(clients, client, url, clients.path(FRESH, "/versions"))
            states = {item["version"]: (item["digest"], item["state"]) for item in shown}
            for (model, number), digest in versions.items():
                if model == FRESH and number in states:
                    able = {("retired" if flag else "ready") for flag in books.retired.get((model, number), {False})}
                    assert states[number][0] == digest, (number, states[number])
                    assert states[number][1] in able, (number, states[number], able)
            for keys in books.keys.values():
                answer = await client.get(f"{url}/v1/models", headers={"authorization": f"Bearer {keys[-1]}"})
                assert answer.status_code == httpx.codes.OK, answer.text
        await _check_events(clients, client, moves, versions, books.key_ids[since.key_ids :])


async def _check_events(
    clients: Clients,
    client: httpx.AsyncClient,
    moves: list[Change],
    versions: dict[tuple[str, int], str],
    key_ids: list[str],
) -> None:
    """The newest page of each kind has what is young enough to be on it."""
    keys = await _list(clients, client, clients.urls[0], "/audit?action=key.created")
    assert set(key_ids[-_PAGE:]) <= {event["subject"] for event in keys}, "a key without its event"
    moved = await _list(clients, client, clients.urls[0], f"/audit?subject={MOVED}")
    revisions = {(event["details"].get("after") or {}).get("revision", 0) for event in moved}
    for move in moves:
        assert move.revision in revisions or (move.revision or 0) < max(revisions) - _PAGE // 2, (move, revisions)
    uploaded = {event["subject"] for event in await _list(clients, client, clients.urls[0], f"/audit?subject={FRESH}")}
    numbers = sorted(number for model, number in versions if model == FRESH)
    assert {f"{FRESH}@{number}" for number in numbers[-_PAGE // 8 :]} <= uploaded, uploaded


async def check_rows(database_url: str, books: Books, since: Since) -> None:
    """One row for each request that ran, and it says what the client saw: exactly, where that saw the end."""
    await wait_settled(database_url)
    known = {answer.request_id: answer for answer in books.answers[since.answers :] if answer.request_id}
    rows = {row["request_id"]: row for row in await _read(database_url, usage) if row["request_id"] in known}
    for request_id, answer in known.items():
        row = rows.get(request_id)
        if answer.end == "ok":
            assert row is not None, answer
            cost = (row["outcome"], row["completion_tokens"], row["digest"] or "base")
            assert cost == ("ok", answer.num_tokens, answer.digest), (answer, row)
        elif row is not None:
            assert (row["completion_tokens"] or 0) <= NUM_TOKENS * len(answer.texts), (answer, row)


async def wait_settled(database_url: str) -> None:
    """Wait until no request is open, whose rows are then one for one those of usage."""
    deadline = time.monotonic() + SETTLED_S
    while rows := [row for row in await _read(database_url, request) if row["settled_at"] is None]:
        assert time.monotonic() < deadline, f"never settled: {rows}"
        await asyncio.sleep(0.3)
    opened = [row["request_id"] for row in await _read(database_url, request)]
    settled = [row["request_id"] for row in await _read(database_url, usage)]
    assert sorted(opened) == sorted(settled)


def longest_s(answers: list[Answer]) -> float:
    """How long the slowest took."""
    return max((answer.ended_at - answer.began_at for answer in answers), default=0.0)


async def _list(clients: Clients, client: httpx.AsyncClient, url: str, path: str) -> list[dict[str, Any]]:
    answer = await clients.manage(client, url, "GET", f"{path}{'&' if '?' in path else '?'}limit={_PAGE}")
    assert answer is not None, clients.books.acts[-1]
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


async def _read(database_url: str, table: sa.Table) -> list[dict[str, Any]]:
    database = Database(database_url)
    try:
        async with database.read() as connection:
            return [dict(row) for row in (await connection.execute(sa.select(table))).mappings()]
    finally:
        await database.close()
