"""The pages of plans and of advice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dashboard_world import Browser, find_unsafe, read_text
from gateway_world import GatewayWorld, enclosed_world


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        await found.create_tenant("team-x")
        yield found


async def test_the_first_plan_shows_the_worked_figures(world: GatewayWorld) -> None:
    browser = Browser(world)
    await browser.log_in(await world.create_key("team-x"))
    page = await browser.get("/ui/plan")
    text = read_text(page.text)
    assert page.status_code == 200
    assert find_unsafe(page.text) == []
    for figure in ("13,631,488", "14.96 GiB", "598", "589x", "560x", "units mixed"):
        assert figure in text


async def test_a_plan_that_makes_no_sense_says_why_and_keeps_what_was_typed(world: GatewayWorld) -> None:
    browser = Browser(world)
    await browser.log_in()
    for query, words in (
        ("model=nothing&gpu=h100", "There is no such preset"),
        ("model=llama-3.1-8b&gpu=<b>card</b>", "is not known"),
        ("model=llama-3.1-8b&gpu=h100&count=many", "whole number"),
        ("model=llama-3.1-8b&gpu=h100&dtype=int3", "dtype"),
    ):
        page = await browser.get(f"/ui/plan?{query}")
        assert page.status_code == 400
        assert words in read_text(page.text)
        assert find_unsafe(page.text) == []
        assert "<b>" not in page.text


async def test_advice_is_for_those_who_may_read_usage(world: GatewayWorld) -> None:
    await world.push("team-x", "style")
    admin, without = Browser(world), Browser(world)
    await admin.log_in()
    page = await admin.get("/ui/advice")
    assert page.status_code == 200, page.text
    assert find_unsafe(page.text) == []
    await without.log_in(await world.create_key("team-x"))
    assert (await without.get("/ui/advice")).status_code == 403
