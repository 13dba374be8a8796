"""One fault under load: it comes, goes, all must be well again, and the books must be right."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from chaos_base import World
from chaos_books import count_ends
from chaos_checks import Since, Span, check_answers, check_ends, check_kept, check_rows, longest_s
from chaos_fault import COLD, COLD_S, Fault
from chaos_page import Row, note

CALM_S = 1.0
"""Load without a fault, before and after it."""


async def run_fault(world: World, fault: Fault) -> None:
    """Let a world suffer a fault, check everything, and note what came of it."""
    if fault.needs and fault.needs not in world.tools:
        pytest.skip(f"there is no {fault.needs} here that can be hurt (a small disk takes root, a clock a C compiler)")
    books, since = world.clients.books, Since.of(world.clients.books)
    async with world.clients.load():
        await asyncio.sleep(CALM_S)
        began_at = time.monotonic()
        async with fault.act(world):
            await asyncio.sleep(fault.held_s)
            over_at = time.monotonic()
        await world.wait_answering(fault.back_s)
        answering_at = time.monotonic()
        await world.wait_whole(fault.back_s)
        span = Span(began_at, time.monotonic())
        await asyncio.sleep(CALM_S)
    await world.wait_idle()
    check_answers(books, since, world.reference)
    check_ends(books, since, fault, span, world.gateways[0].url, world.cold_until)
    if fault.ends & COLD:
        world.cold_until = span.ended_at + COLD_S
    await check_kept(world.clients, since)
    await check_rows(world.database_url, books, since)
    assert books.faults == []
    beside = [one for one in books.answers[since.answers :] if one.ended_at > began_at and one.began_at < over_at]
    row = Row(
        fault=fault.name,
        holds=fault.holds,
        ends=count_ends(beside),
        longest_s=longest_s(beside),
        answering_s=answering_at - over_at,
        whole_s=span.ended_at - over_at,
    )
    note(row, os.environ.get("LORAPLEX_TEST_CHAOS_ROWS"))
