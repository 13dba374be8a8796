"""The dashboard in a real Chromium: a gateway in a thread of its own, a browser beside it, and what both are asked for.

Chromium is the system's, as it is on the PATH.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gateway_world import ADMIN_KEY

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
_REFUSALS = ("Failed to load resource", "Response Status Error Code")
T = TypeVar("T")


class BrowserUnavailable(Exception):
    """There is no browser here; the message says what is missing."""


class Served(Protocol):
    """What a thread serves."""

    @property
    def url(self) -> str:
        """Where the gateway listens."""


W = TypeVar("W", bound=Served)


class UiWorld(Generic[W]):
    """A world that runs in its own thread; `run` does something in it."""

    def __init__(self) -> None:
        self.world: W
        self._loop = asyncio.new_event_loop()
        self._end: asyncio.Event
        self._ready = threading.Event()
        self._error: BaseException | None = None

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self.world.url

    def run(self, work: Callable[[W], Coroutine[Any, Any, T]]) -> T:
        """Do something in the world's loop and return what it returns."""
        return asyncio.run_coroutine_threadsafe(work(self.world), self._loop).result(_CALL_S)

    def start(self, open_world: Callable[[], AbstractAsyncContextManager[W]]) -> None:
        """Run the world until `stop`."""
        self._thread = threading.Thread(target=self._serve, args=(open_world,), daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S) or self._error is not None:
            raise RuntimeError("the world does not start") from self._error

    def stop(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_START_S)

    def _serve(self, open_world: Callable[[], AbstractAsyncContextManager[W]]) -> None:
        async def live() -> None:
            self._end = asyncio.Event()
            async with open_world() as self.world:
                self._ready.set()
                await self._end.wait()

        try:
            self._loop.run_until_complete(live())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
            self._loop.close()


@contextmanager
def serving(open_world: Callable[[], AbstractAsyncContextManager[W]]) -> Iterator[UiWorld[W]]:
    """Yield a world that runs in a thread of its own."""
    found: UiWorld[W] = UiWorld()
    found.start(open_world)
    try:
        yield found
    finally:
        found.stop()


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


def find_spilt(page: Any) -> list[str]:
    """Cells of tables whose text runs into the next one."""
    return list(
        page.evaluate(
            """() => [...document.querySelectorAll(".table :is(th, td)")]
              .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth)
              .map((one) => one.textContent.trim().slice(0, 60))
              .slice(0, 5)"""
        )
    )


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


def find_cut(page: Any) -> list[str]:
    """Tables that do not fit into their place, so that a part of them is reached by scrolling alone."""
    return list(
        page.evaluate(
            """() => [...document.querySelectorAll(".scroll")]
              .filter((one) => one.scrollWidth > one.clientWidth + 1)
              .map((one) => `${one.getAttribute("aria-label")}: ${one.scrollWidth} > ${one.clientWidth}`)"""
        )
    )


def watch_console(page: Any, *, may_be_refused: bool = False) -> list[str]:
    """What a page's console says against it from now on; `may_be_refused`: answers that are refusals are none of it."""
    complaints: list[str] = []

    def note(message: Any) -> None:
        is_refusal = may_be_refused and message.text.startswith(_REFUSALS)
        if message.type == "error" and not is_refusal:
            place = message.location
            complaints.append(f"{message.text} ({place.get('url')}:{place.get('lineNumber')})")

    page.on("console", note)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    return complaints


def drop_path(page: Any, selector: str, path: Path) -> None:
    """Drop a file or folder of this machine on an element, as a hand does: by the browser's own input."""
    box = page.locator(selector).bounding_box()
    session = page.context.new_cdp_session(page)
    place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **place, "data": data})
    session.detach()


def measure_first_paint(page: Any, url: str) -> float:
    """Seconds from asking for a page to the first thing that it shows."""
    page.goto(url)
    page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
    return float(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")) / 1e3
