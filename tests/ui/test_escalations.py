"""An escalation by mouse: who asked may not say yes, another one may, and each verb leads to the next."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from escalation_world import FULL, POOL, EscalationWorld, running_escalations
from ui_world import WIDTHS, UiWorld, find_overflow, find_violations, serving

Site = UiWorld[EscalationWorld]
Shoot = Callable[[Any, str], None]


@pytest.fixture(scope="module")
def platform(chromium: Any, new_database: Callable[[str], Any]) -> Iterator[Site]:
    """A gateway with a pool for a full model."""
    assert chromium
    url, folder = new_database("escalations")
    with serving(lambda: running_escalations(url, folder)) as found:
        yield found


@pytest.fixture
def escalation(platform: Site) -> Iterator[str]:
    """One that was just asked for."""

    async def ask(world: EscalationWorld) -> str:
        opened = await world.open()
        assert opened.status_code == 201, opened.text
        found: str = opened.json()["id"]
        return found

    yield platform.run(ask)
    platform.run(lambda world: world.end_all())


def press(tab: Any, verb: str, **fields: str) -> None:
    """Open the dialog of a verb, fill it in and send it."""
    tab.get_by_role("button", name=f"{verb}…").click()
    dialog = tab.get_by_role("dialog")
    for label, value in fields.items():
        control = dialog.get_by_label(label.replace("_", " "), exact=True)
        if control.evaluate("one => one.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
    dialog.get_by_role("button", name=verb, exact=True).click()


def wait_for_state(tab: Any, state: str) -> None:
    tab.locator(".figure", has_text=re.compile(rf"^\s*State\s*{state}")).wait_for()


def test_every_verb_leads_on_and_back(
    open_tab: Callable[..., Any], platform: Site, escalation: str, shoot: Shoot
) -> None:
    tab = open_tab(platform.url, key=platform.world.admin)
    tab.goto(f"{platform.url}/ui/escalations")
    shoot(tab, "escalations-open")
    tab.get_by_role("link", name="team-x/default@1").click()
    wait_for_state(tab, "requested")
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        shoot(tab, f"escalation-requested-{width}")
        assert find_overflow(tab) == []
    tab.set_viewport_size({"width": WIDTHS[0], "height": 900})
    tab.get_by_role("button", name="Approve…").click()
    shoot(tab, "escalation-approve")
    assert find_violations(tab) == []
    # axe leaves empty styles behind, which htmx would copy and the page's policy refuses
    tab.reload()
    press(tab, "Approve", Owner="grace", Justification="Contracts need it.", Budget_a_month="2500.50")
    wait_for_state(tab, "approved")
    press(tab, "Register", Pool=POOL, Digest_of_its_files=FULL)
    wait_for_state(tab, "registered")
    assert platform.run(lambda world: world.live()) == [(1, 100)]
    press(tab, "Activate")
    wait_for_state(tab, "active")
    assert platform.run(lambda world: world.live()) == [(2, 100)]
    shoot(tab, "escalation-active")
    press(tab, "Revert", **{"Reason, if you like": "It was worse."})
    wait_for_state(tab, "registered")
    tab.get_by_text("It was worse.").wait_for()
    assert platform.run(lambda world: world.live()) == [(1, 100)]
    press(tab, "Close")
    wait_for_state(tab, "closed")
    tab.emulate_media(color_scheme="dark")
    assert find_violations(tab) == []
    shoot(tab, "escalation-closed-dark")
    assert escalation in tab.url


def test_who_asked_is_refused_in_the_dialog_and_another_one_says_yes(
    open_tab: Callable[..., Any], platform: Site, escalation: str, shoot: Shoot
) -> None:
    own = platform.run(lambda world: world.world.create_key("staff", role="admin", owner="tina"))
    tab = open_tab(platform.url, key=own, may_be_refused=True)
    tab.goto(f"{platform.url}/ui/escalations/{escalation}")
    tab.get_by_text("You asked for this yourself").wait_for()
    press(tab, "Approve", Owner="tina", Justification="I want it.", Budget_a_month="1")
    tab.get_by_role("dialog").get_by_role("alert").wait_for()
    shoot(tab, "escalation-own")
    other = open_tab(platform.url, key=platform.world.admin)
    other.goto(f"{platform.url}/ui/escalations/{escalation}")
    press(other, "Reject", Reason="More data first.")
    wait_for_state(other, "rejected")


def test_a_team_sees_its_own_and_may_end_it(open_tab: Callable[..., Any], platform: Site, escalation: str) -> None:
    tab = open_tab(platform.url, key=platform.world.team)
    tab.goto(f"{platform.url}/ui/escalations/{escalation}")
    assert tab.get_by_role("button", name="Approve…").count() == 0
    press(tab, "Close")
    wait_for_state(tab, "closed")
