"""What pins mean, by the names of the moment."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.fleet.desired import BrokenAlias, Desired, Naming, PinGoal
from loraplex.fleet.pools import Pin, Pool
from loraplex.gateway.desired_state import DesiredState
from loraplex.gateway.names import NameIndex
from loraplex_registry.wire.adapter import AdapterName, BaseName, NamesDelta, Target, VersionName

DIGESTS = {number: "sha256:" + str(number) * 64 for number in range(1, 6)}
STATES = {1: "ready", 2: "ready", 3: "quarantined", 4: "retired", 5: "purged"}


def adapter(name: str, base: str = "base", **changes: Any) -> AdapterName:
    """An adapter with a version in each state; `live` is 1, `canary` 1 and 2, `mixed` 2 and 3, `ill` 3."""
    versions = tuple(VersionName(number, DIGESTS[number], state, base, "lora", 8) for number, state in STATES.items())
    aliases = {
        "live": (Target(1, 100),),
        "canary": (Target(1, 90), Target(2, 10)),
        "mixed": (Target(2, 50), Target(3, 50)),
        "ill": (Target(3, 100),),
    }
    fields: dict[str, Any] = {
        "adapter_id": f"id-{name}",
        "tenant_id": "id-team-x",
        "tenant": "team-x",
        "name": name,
        "base": base,
        "is_default": name == "default",
        "deleted": False,
        "versions": versions,
        "aliases": aliases,
        "alias_ids": {alias: f"id-{alias}" for alias in aliases},
    }
    return AdapterName(**fields | changes)


BASE = BaseName(
    name="base", accepted_names=(), fingerprint="f", weights_digest="w", max_lora_rank=64, default_context=512
)


async def read(*models: str, adapters: tuple[AdapterName, ...] = (adapter("default"),)) -> Desired:
    async def fetch(since: int) -> NamesDelta:
        return NamesDelta(epoch=1, adapters=adapters, bases=(BASE,))

    async def find_broken() -> list[BrokenAlias]:
        return []

    names = NameIndex(fetch, lambda: 1, {"team-x": "id-team-x"}.get)
    pool = Pool("main", "base", ("http://a",), None, tuple(Pin(model) for model in models))
    return await DesiredState(lambda: [pool], names, find_broken).read()


async def read_one(model: str, *adapters: AdapterName) -> PinGoal:
    (goal,) = (await read(model, adapters=adapters or (adapter("default"),))).goals
    return goal


@pytest.mark.parametrize(
    ("model", "numbers"),
    [
        ("team-x", [1]),
        ("team-x/default", [1]),
        ("team-x/default@canary", [1, 2]),
        ("team-x/default@mixed", [2]),
        ("team-x/default@2", [2]),
        (f"team-x/default@{DIGESTS[2][:24]}", [2]),
    ],
)
async def test_a_pin_means_every_version_that_its_name_may_lead_to(model: str, numbers: list[int]) -> None:
    goal = await read_one(model)
    assert goal.problem is None
    assert [content.digest for content in goal.contents] == [DIGESTS[number] for number in numbers]
    assert [content.name for content in goal.contents] == [f"team-x/default@{number}" for number in numbers]
    assert {content.rank for content in goal.contents} == {8}


@pytest.mark.parametrize(
    ("model", "because"),
    [
        ("team-y", "team-y"),
        ("team-x/other", "team-x/other"),
        ("team-x/default@none", "alias"),
        ("team-x/default@ill", "quarantined"),
        ("team-x/default@4", "retired"),
        ("team-x/default@5", "purged"),
        ("base", "is a base"),
        ("Team X", "Team X"),
        ("@", "@"),
    ],
)
async def test_a_pin_that_means_nothing_says_why(model: str, because: str) -> None:
    goal = await read_one(model)
    assert goal.contents == ()
    assert because in (goal.problem or "")


async def test_a_pin_of_another_base_says_so() -> None:
    goal = await read_one("team-x", adapter("default", "other"))
    assert "is for other, and the pool serves base" in (goal.problem or "")


async def test_a_pin_of_a_full_fine_tune_says_who_serves_it() -> None:
    full = VersionName(1, DIGESTS[1], "ready", "base", "full", 0, pool="full-pool")
    goal = await read_one("team-x", adapter("default", versions=(full,)))
    assert (goal.contents, goal.problem) == (
        (),
        "team-x/default@1 is a full fine-tune, which the pool full-pool always serves",
    )


async def test_content_is_callable_retired_or_nameless() -> None:
    find_naming = (await read()).find_naming
    found = [find_naming("base", DIGESTS[number]) for number in STATES]
    assert found == [Naming.CALLABLE, Naming.CALLABLE, Naming.CALLABLE, Naming.RETIRED, Naming.NAMELESS]
    assert find_naming("other", DIGESTS[1]) is Naming.NAMELESS
    gone = await read(adapters=(adapter("default", deleted=True),))
    assert gone.find_naming("base", DIGESTS[1]) is Naming.NAMELESS
