"""What pages cost the gateway with 400 adapters: `make bench_dashboard`, a minute; ARGS='--profile /ui/' shows where.

One gateway in this process, called without sockets: CPU seconds of all its threads, and queries, for each page. The
hour before has the pieces that a recorder writes; nothing is asked twice within the seconds that figures are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Report, build_parser, follow, parse_options

from dashboard_adapters import fill_adapters
from dashboard_traffic import fill_events, fill_stats, fill_tenants, fill_usage
from dashboard_world import Browser
from gateway_world import GatewayWorld, enclosed_world
from loraplex_registry.app import upgrade

PAGES = (
    "/ui/",
    "/ui/?window=1h",
    "/ui/traffic?by=adapter",
    "/ui/traffic?by=adapter&window=1h",
    "/ui/adapters",
    "/ui/adapters/team-003/adapter-003",
    "/ui/adapters/team-003/adapter-003/versions/3",
    "/ui/upload",
    "/ui/playground",
    "/ui/escalations",
    "/ui/plan",
    "/ui/advice",
    "/ui/slots",
    "/ui/usage",
    "/ui/limits",
    "/ui/limits/team-001",
    "/ui/audit",
    "/ui/login",
)
_FRESH_S = 3.2
_MAX_S = 0.4
_MS = 1e3


def main() -> int:
    """Measure and print; returns 1 where a page takes too long."""
    parser = build_parser(__doc__)
    parser.add_argument("--adapters", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", help="show where the time of this page goes instead")
    options = parse_options(parser)
    report = Report("dashboard", options)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(report, options, Path(folder)))
    return report.close()


async def _measure(report: Report, options: argparse.Namespace, folder: Path) -> None:
    url = f"sqlite+aiosqlite:///{folder / 'loraplex.db'}"
    upgrade(url)
    num_adapters = 12 if options.quick else options.adapters
    num_tenants = max(1, num_adapters // 10)
    async with enclosed_world(url, folder) as world:
        await fill_tenants(world, num_tenants)
        await fill_stats(world, num_tenants, num_adapters)
        await fill_usage(world, num_tenants, num_adapters)
        await fill_events(world, 200)
        await fill_adapters(world, num_tenants, num_adapters)
        browser = Browser(world)
        await browser.log_in()
        if options.profile:
            await _profile(browser, options.profile)
            return
        rows = []
        for page in follow(PAGES, "pages"):
            taken = [await _take(world, browser, page) for _ in range(1 if options.quick else options.repeats)]
            cpu_ms = statistics.median(one[0] for one in taken)
            rows.append([page, cpu_ms, taken[0][1], taken[0][2] / 1024])
            report.check(f"{page}, CPU ms", cpu_ms, at_most=_MS * _MAX_S)
        report.table(["page", "CPU ms", "queries", "KiB"], rows)


async def _take(world: GatewayWorld, browser: Browser, page: str) -> tuple[float, int, int]:
    """CPU milliseconds, queries and bytes of one page."""
    # figures of the page before are not this one's
    await asyncio.sleep(_FRESH_S)
    with _counted(world) as queries:
        began = time.process_time()
        response = await browser.get(page)
        cpu_s = time.process_time() - began
    assert response.status_code == 200, (page, response.text)
    return _MS * cpu_s, len(queries), len(response.content)


@contextmanager
def _counted(world: GatewayWorld) -> Iterator[list[str]]:
    """What both databases of the process are asked meanwhile."""
    asked: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    registry = world.gateway._registry.services.database._engine
    engines = [world.gateway.database.engine.sync_engine, registry.sync_engine]
    for engine in engines:
        sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        for engine in engines:
            sa.event.remove(engine, "before_cursor_execute", note)


async def _profile(browser: Browser, page: str) -> None:
    await browser.get(page)
    await asyncio.sleep(_FRESH_S)
    profile = cProfile.Profile()
    profile.enable()
    await browser.get(page)
    profile.disable()
    pstats.Stats(profile).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    sys.exit(main())
