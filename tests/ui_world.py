"""The dashboard in a real Chromium: a gateway in a thread of its own, a browser beside it, and what both are asked for.

Chromium is the system's, as it is on the PATH.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gateway_world import ADMIN_KEY, GatewayWorld, running_world

AXE = Path(__file__).parent / "ui" / "axe.min.js"
WIDTHS = (1280, 400)
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_START_S, _CALL_S = 60, 60
T = TypeVar("T")


class BrowserUnavailable(Exception):
    """There is no browser here; the message says what is missing."""


class UiWorld:
    """A world that runs in its own thread; `run` does something in it."""

    def __init__(self) -> None:
        self.world: GatewayWorld
        self._loop = asyncio.new_event_loop()
        self._end: asyncio.Event
        self._ready = threading.Event()
        self._error: BaseException | None = None

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self.world.url

    def run(self, work: Callable[[GatewayWorld], Coroutine[Any, Any, T]]) -> T:
        """Do something in the world's loop and return what it returns."""
        return asyncio.run_coroutine_threadsafe(work(self.world), self._loop).result(_CALL_S)

    def start(self, database_url: str, folder: Path, num_engines: int) -> None:
        """Run the world until `stop`."""
        self._thread = threading.Thread(target=self._serve, args=(database_url, folder, num_engines), daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S) or self._error is not None:
            raise RuntimeError("the world does not start") from self._error

    def stop(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_START_S)

    def _serve(self, database_url: str, folder: Path, num_engines: int) -> None:
        async def live() -> None:
            self._end = asyncio.Event()
            async with running_world(database_url, folder, num_engines) as self.world:
                self._ready.set()
                await self._end.wait()

        try:
            self._loop.run_until_complete(live())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
            self._loop.close()


def find_chromium() -> str:
    """Return the path of a Chromium.

    Raises:
        BrowserUnavailable: There is none, or nothing that drives it.
    """
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError as error:
        raise BrowserUnavailable("the package playwright is not installed: pip install -e '.[ui]'") from error
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise BrowserUnavailable("there is no chromium on the PATH; Debian's package is called chromium")
    return found


@contextmanager
def running_browser() -> Iterator[Any]:
    """Yield a Chromium without a screen."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def log_in(page: Any, url: str, key: str = ADMIN_KEY) -> None:
    """Log in by the form."""
    page.goto(f"{url}/ui/login")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/ui/")


def find_violations(page: Any) -> list[str]:
    """What axe-core finds on a page that is serious or worse, each with the first element that it is about.

    A context that bypasses the page's policy would be another page: the script goes in by the debugger.
    """
    page.evaluate(AXE.read_text(encoding="utf-8"))
    # rows of a list are all alike, and hundreds of them would take long
    part = "{exclude: ['tbody tr:nth-child(n+9)']}"
    found = page.evaluate(f"async () => (await axe.run({part})).violations")
    return [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def find_overflow(page: Any) -> list[str]:
    """Elements that stick out of the page to the right, but those in a region that scrolls."""
    return list(
        page.evaluate(
            """() => {
              const width = document.documentElement.clientWidth;
              const scrolls = (one) => one.closest(".scroll, .tabs, .chart, .visually-hidden, .skip, dialog");
              return [...document.body.querySelectorAll("*")]
                .filter((one) => one.getBoundingClientRect().right > width + 1 && !scrolls(one))
                .map((one) => `${one.tagName}.${one.className} ${one.textContent.trim().slice(0, 60)}`)
                .slice(0, 5);
            }"""
        )
    )
