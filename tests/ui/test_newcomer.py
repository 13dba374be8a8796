"""A platform on which nothing is yet, as whoever just started it sees it; advice once there is something to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from dashboard_traffic import build_usage
from gateway_world import BASE, GatewayWorld, running_world
from loraplex.db.tables import tenant, usage
from ui_world import WIDTHS, UiWorld, find_overflow, find_violations, serving

Site = UiWorld[GatewayWorld]
Shoot = Callable[[Any, str], None]
PAGES = (
    "",
    "traffic",
    "adapters",
    "upload",
    "playground",
    "escalations",
    "advice",
    "slots",
    "usage",
    "limits",
    "audit",
)


@pytest.fixture(scope="module")
def bare(chromium: Any, new_database: Callable[[str], Any]) -> Iterator[Site]:
    """A gateway without engines, tenants, adapters or calls."""
    assert chromium
    url, folder = new_database("bare")
    with serving(lambda: running_world(url, folder, 0)) as found:
        yield found


@pytest.mark.parametrize("width", WIDTHS)
def test_empty_pages_say_what_to_do(open_tab: Callable[..., Any], bare: Site, width: int, shoot: Shoot) -> None:
    tab = open_tab(bare.url, width)
    for page in PAGES:
        tab.goto(f"{bare.url}/ui/{page}")
        shoot(tab, f"empty-{page or 'overview'}-{width}")
        assert find_overflow(tab) == [], page
        if width == WIDTHS[0]:
            assert find_violations(tab) == [], page


def test_advice_is_a_card_with_its_evidence_and_its_flag(
    open_tab: Callable[..., Any], new_database: Callable[[str], Any], shoot: Shoot
) -> None:
    url, folder = new_database("advice")
    with serving(lambda: running_world(url, folder)) as found:
        found.run(plant_advice)
        tab = open_tab(found.url)
        tab.goto(f"{found.url}/ui/advice")
        card = tab.locator("article", has_text="max loras")
        card.get_by_text("--max-loras 12").wait_for()
        card.get_by_text("Evidence").click()
        card.get_by_text("loads again", exact=True).wait_for()
        assert find_violations(tab) == []
        shoot(tab, "advice-findings")
        tab.set_viewport_size({"width": 400, "height": 900})
        assert find_overflow(tab) == []
        tab.get_by_role("link", name="Limits of team-a").click()
        tab.get_by_role("heading", name="Limits of team-a").wait_for()


async def plant_advice(world: GatewayWorld) -> None:
    """Calls of twelve adapters in turn on an engine with eight slots, of a tenant that is near a limit."""
    engine = world.engine
    engine.num_slots = 8
    engine.state_changes["model"] = {
        "name": BASE,
        "fingerprint": engine.fingerprint,
        "max_loras": 8,
        "max_model_len": 8192,
    }
    await world.create_tenant("team-a", limits={"requests_per_minute": 100})
    await world.gateway.fleet.poll()
    tenant_id = str((await world.rows(tenant))[0]["id"])
    began_at = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=1)
    rows = [
        build_usage(tenant_id, "team-a", f"adapter-{number % 12}", began_at + timedelta(seconds=number / 10))
        | {
            "digest": f"sha256:{number % 12:064}",
            "replica": engine.url,
            "load_bytes": 27_262_976,
            "prompt_tokens": 300,
            "completion_tokens": 90,
            "outcome": "ok",
        }
        for number in range(590)
    ]
    async with world.gateway.database.write() as connection:
        await connection.execute(sa.insert(usage), rows)
