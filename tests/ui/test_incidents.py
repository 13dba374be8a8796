"""Incidents that were planted, found with the dashboard alone: from the overview to the cause, and to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dashboard_incidents import CANARY, FLOOD, WANTED, plant_all
from gateway_world import GatewayWorld, running_world
from ui_world import WIDTHS, UiWorld, find_overflow, find_violations, serving

Site = UiWorld[GatewayWorld]
Shoot = Callable[[Any, str], None]


@pytest.fixture(scope="module")
def incident(chromium: Any, new_database: Callable[[str], Any]) -> Iterator[Site]:
    """A platform on which all goes wrong at once."""
    assert chromium
    url, folder = new_database("incident")
    with serving(lambda: running_world(url, folder)) as found:
        found.run(plant_all)
        yield found


@pytest.fixture
def tab(open_tab: Callable[..., Any], incident: Site) -> Any:
    return open_tab(incident.url)


def follow(tab: Any, title: str) -> None:
    """From the sign on the overview to where it leads."""
    tab.get_by_role("link", name="Overview").click()
    sign = tab.locator(".sign", has_text=title)
    sign.get_by_role("link").click()


def test_the_overview_names_every_cause(tab: Any, incident: Site, shoot: Shoot) -> None:
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        tab.goto(f"{incident.url}/ui/")
        assert tab.locator(".sign").count() == 3
        shoot(tab, f"incidents-{width}")
        assert find_overflow(tab) == []
        assert find_violations(tab) == []
    tab.emulate_media(color_scheme="dark")
    assert find_violations(tab) == []
    shoot(tab, "incidents-400-dark")


def test_a_flooding_tenant_is_found_and_so_is_what_limits_it(tab: Any, incident: Site) -> None:
    tab.goto(f"{incident.url}/ui/")
    follow(tab, f"{FLOOD} floods the engines")
    tab.get_by_role("heading", name=f"Limits of {FLOOD}").wait_for()
    tab.goto(f"{incident.url}/ui/traffic?by=tenant")
    assert tab.locator("tbody tr").first.locator("th").inner_text() == FLOOD


def test_adapters_that_push_each_other_out_are_found(tab: Any, incident: Site, shoot: Shoot) -> None:
    tab.goto(f"{incident.url}/ui/")
    follow(tab, "Adapters push each other out")
    tab.get_by_text("Slot thrash: 3 adapters are wanted and there are 2 slots").wait_for()
    for name in WANTED:
        tab.get_by_role("link", name=name).wait_for()
    shoot(tab, "slots-thrash")


def test_a_bad_canary_is_found_and_taken_back(tab: Any, incident: Site, shoot: Shoot) -> None:
    name = "/".join(CANARY)
    tab.goto(f"{incident.url}/ui/")
    follow(tab, f"The canary of {name} fails")
    notice = tab.get_by_role("alert")
    notice.get_by_text("Version 2, which has 10 % of live, failed 70 of 100 calls").wait_for()
    # buttons do what they say once the page's scripts are there
    tab.wait_for_load_state("load")
    shoot(tab, "adapter-canary-fails")
    notice.get_by_role("button", name="Promote version 1…").click()
    dialog = tab.get_by_role("dialog")
    dialog.get_by_text("live leads to version 1 (90 %) and version 2 (10 %) now").wait_for()
    shoot(tab, "promote-asked")
    dialog.get_by_role("button", name="Promote", exact=True).click()
    tab.get_by_text(f"{name} leads to version 1.").wait_for()
    notice.wait_for(state="hidden")
    tab.get_by_role("link", name="Overview").click()
    tab.get_by_role("heading", name="Overview").wait_for()
    assert tab.locator(".sign", has_text=name).count() == 0
