"""One gateway with an hour of figures, and one Chromium, for all tests here, which `make test-ui` asks for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import skip_or_fail
from dashboard_traffic import fill_events, fill_stats, fill_tenants, fill_usage
from gateway_world import ADMIN_KEY, GatewayWorld, running_world
from ui_world import BrowserUnavailable, UiWorld, find_chromium, log_in, running_browser, serving, watch_console

NUM_TENANTS, NUM_ADAPTERS = 40, 400
MAX_PICTURE_HEIGHT = 3000
Shoot = Callable[[Any, str], None]
NewDatabase = Callable[[str], tuple[str, Path]]


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A browser without a screen; where nobody asks for one these tests would take minutes of `make test`."""
    is_asked_for = "chromium" in os.environ.get("LORAPLEX_TEST_REQUIRE", "") or request.config.getoption("--shots")
    if not is_asked_for:
        pytest.skip("a real browser is met by make test-ui")
    try:
        find_chromium()
    except BrowserUnavailable as reason:
        skip_or_fail("chromium", str(reason))
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def new_database(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> NewDatabase:
    """Makes an empty database and a folder for a world of a name."""

    def make(name: str) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp(name)
        shutil.copyfile(sqlite_template, folder / "loraplex.db")
        return f"sqlite+aiosqlite:///{folder / 'loraplex.db'}", folder

    return make


@pytest.fixture(scope="session")
def site(chromium: Any, new_database: NewDatabase) -> Iterator[UiWorld[GatewayWorld]]:
    """A gateway with two engines, forty tenants, four hundred adapters and all their traffic."""
    assert chromium
    url, folder = new_database("ui")
    with serving(lambda: running_world(url, folder, 2)) as found:
        for engine in found.world.engines:
            engine.num_slots = 8
            engine.state_changes["kv"] = {"num_blocks": 1000, "num_free": 250, "block_size": 16}
        found.run(lambda world: fill_tenants(world, NUM_TENANTS))
        found.run(lambda world: fill_stats(world, NUM_TENANTS, NUM_ADAPTERS))
        found.run(lambda world: fill_usage(world, NUM_TENANTS, NUM_ADAPTERS))
        found.run(lambda world: fill_events(world, 120))
        yield found


@pytest.fixture
def open_tab(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages that are logged in at an address; what a console says against one fails the test."""
    opened: list[tuple[Any, list[str]]] = []

    def open_one(
        url: str, width: int = 1280, scheme: str = "light", key: str = ADMIN_KEY, *, may_be_refused: bool = False
    ) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        opened.append((context, watch_console(page, may_be_refused=may_be_refused)))
        log_in(page, url, key)
        return page

    yield open_one
    for context, _ in opened:
        context.close()
    assert [text for _, complaints in opened for text in complaints] == []


@pytest.fixture
def open_page(open_tab: Callable[..., Any], site: UiWorld[GatewayWorld]) -> Callable[..., Any]:
    """Opens pages of the site."""
    return lambda width=1280, scheme="light", key=ADMIN_KEY: open_tab(site.url, width, scheme, key)


@pytest.fixture
def shoot(request: pytest.FixtureRequest) -> Shoot:
    """Takes a picture of a page, of hundreds of rows the first ones, where pictures are asked for."""
    folder: Path | None = request.config.getoption("--shots")

    def take(page: Any, name: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            # hiding the caret would put a style into the page, which htmx copies and the page's policy refuses
            size = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
            clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], MAX_PICTURE_HEIGHT)}
            page.screenshot(path=folder / f"{name}.png", full_page=True, clip=clip, caret="initial")

    return take
