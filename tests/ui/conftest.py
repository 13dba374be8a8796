"""One gateway with an hour of figures, and one Chromium, for all tests here; skipped where there is no browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import skip_or_fail
from dashboard_traffic import fill_events, fill_stats, fill_tenants, fill_usage
from ui_world import BrowserUnavailable, UiWorld, find_chromium, log_in, running_browser

NUM_TENANTS, NUM_ADAPTERS = 40, 400


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser without a screen."""
    try:
        find_chromium()
    except BrowserUnavailable as reason:
        skip_or_fail("chromium", str(reason))
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def site(chromium: Any, sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UiWorld]:
    """A gateway with two engines, forty tenants, four hundred adapters and all their traffic."""
    folder = tmp_path_factory.mktemp("ui")
    shutil.copyfile(sqlite_template, folder / "loraplex.db")
    found = UiWorld()
    found.start(f"sqlite+aiosqlite:///{folder / 'loraplex.db'}", folder, num_engines=2)
    try:
        for engine in found.world.engines:
            engine.num_slots = 8
            engine.state_changes["kv"] = {"num_blocks": 1000, "num_free": 250, "block_size": 16}
        found.run(lambda world: fill_tenants(world, NUM_TENANTS))
        found.run(lambda world: fill_stats(world, NUM_TENANTS, NUM_ADAPTERS))
        found.run(lambda world: fill_usage(world, NUM_TENANTS, NUM_ADAPTERS))
        found.run(lambda world: fill_events(world, 120))
        yield found
    finally:
        found.stop()


@pytest.fixture
def open_page(chromium: Any, site: UiWorld) -> Iterator[Callable[..., Any]]:
    """Opens pages that are logged in; what a console says against one fails the test."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_one(width: int = 1280, scheme: str = "light", key: str | None = None) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        log_in(page, site.url, **({} if key is None else {"key": key}))
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []
