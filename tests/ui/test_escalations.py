"""An escalation by mouse: who asked may not say yes, another one may, and each verb leads to the next."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
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


def fill_opening(tab: Any, **changes: str) -> None:
    """Fill in the form that opens one, as the evidence of the world has it."""
    fields = {
        "Tenant": "team-x",
        "Adapter": "default",
        "Reason, if you like": "The domain is far away.",
        "Evaluation": "helpdesk-2027",
        "Metric": "exact_match",
        "Number of samples": "1200",
        "Base": "0.4",
        "LoRA": "0.55",
        "Target": "0.7",
    }
    for label, value in (fields | changes).items():
        tab.locator("main").get_by_label(label, exact=True).first.fill(value)


def test_an_administrator_opens_one_and_each_mistake_is_told_beside_its_field(
    open_tab: Callable[..., Any], platform: Site, tmp_path: Path, shoot: Shoot
) -> None:
    tab = open_tab(platform.url, key=platform.world.admin, may_be_refused=True)
    tab.goto(f"{platform.url}/ui/escalations")
    tab.get_by_role("link", name="Open an escalation").click()
    tab.get_by_role("heading", name="Open an escalation").wait_for()
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        shoot(tab, f"escalation-open-{width}")
        assert find_overflow(tab) == []
    tab.set_viewport_size({"width": WIDTHS[0], "height": 900})
    assert find_violations(tab) == []
    tab.reload()
    send = tab.get_by_role("button", name="Open", exact=True)
    send.click()
    assert tab.locator(".field-error").count() == 13
    assert tab.evaluate("document.activeElement.name") == "tenant"
    shoot(tab, "escalation-open-missing")
    tab.emulate_media(color_scheme="dark")
    assert find_violations(tab) == []
    shoot(tab, "escalation-open-missing-dark")
    tab.emulate_media(color_scheme="light")
    tab.reload()
    fill_opening(tab, LoRA="0.8")
    data = tmp_path / "test.jsonl"
    data.write_bytes(b"{}\n")
    tab.set_input_files("#digest-file", str(data))
    digest = f"sha256:{hashlib.sha256(data.read_bytes()).hexdigest()}"
    tab.wait_for_function("(wanted) => document.getElementById('digest').value === wanted", arg=digest)
    rows = tab.locator("[data-row]")
    for index, (rank, value) in enumerate((("8", "0.52"), ("8", "0.55"))):
        rows.nth(index).get_by_label("Rank", exact=True).fill(rank)
        rows.nth(index).get_by_label("Value").fill(value)
    send.click()
    lora = tab.locator(".field", has=tab.get_by_label("LoRA"))
    ranks = tab.get_by_role("group", name="Ranks tried")
    ranks.get_by_role("alert").get_by_text("different ranks").wait_for()
    shoot(tab, "escalation-open-refused")
    rows.nth(1).get_by_label("Rank", exact=True).fill("32")
    assert ranks.get_by_role("alert").count() == 0
    send.click()
    lora.get_by_role("alert").get_by_text("reaches the target").wait_for()
    assert tab.evaluate("document.activeElement.name") == "evidence.lora"
    lora.get_by_label("LoRA").fill("0.55")
    assert lora.get_by_role("alert").count() == 0
    send.click()
    wait_for_state(tab, "requested")
    tab.get_by_text("Opened. Another administrator approves it").wait_for()
    tab.get_by_text("You asked for this yourself").wait_for()
    assert tab.locator("dd", has_text=digest).count() == 1
    platform.run(lambda world: world.end_all())


def test_ranks_are_added_and_taken_away_and_adapters_are_those_of_the_tenant(
    open_tab: Callable[..., Any], platform: Site
) -> None:
    platform.run(lambda world: world.world.push("team-y", "other"))
    tab = open_tab(platform.url, key=platform.world.admin)
    tab.goto(f"{platform.url}/ui/escalations/open")
    offered = "() => [...document.querySelectorAll('#adapters option')].map((one) => one.value)"
    assert tab.evaluate(offered) == ["default", "other"]
    tab.get_by_label("Tenant").fill("team-y")
    assert tab.evaluate(offered) == ["other"]
    rows, names = tab.locator("[data-row]"), "[data-row] input"
    tab.get_by_role("button", name="Add a rank").click()
    assert tab.evaluate("document.activeElement.name") == "evidence.ranks_tried[2].rank"
    rows.nth(0).get_by_role("button", name="Remove this rank").click()
    found = tab.locator(names).evaluate_all("(all) => all.map((one) => one.name)")
    assert found == [f"evidence.ranks_tried[{index}].{kind}" for index in (0, 1) for kind in ("rank", "value")]
    rows.nth(0).get_by_role("button", name="Remove this rank").click()
    assert rows.get_by_role("button", name="Remove this rank").is_disabled()


def test_a_team_is_not_offered_to_open_one_here(open_tab: Callable[..., Any], platform: Site) -> None:
    tab = open_tab(platform.url, key=platform.world.team, may_be_refused=True)
    tab.goto(f"{platform.url}/ui/escalations")
    assert tab.get_by_role("link", name="Open an escalation").count() == 0
    assert tab.goto(f"{platform.url}/ui/escalations/open").status == 403
    tab.get_by_role("heading", name="Not allowed").wait_for()
