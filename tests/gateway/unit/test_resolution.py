"""`model=` gives exactly one version or base, or an error; never a substitute."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
import pytest

from loraplex.errors import (
    AdapterLoadingError,
    AdapterQuarantinedError,
    AdapterRetiredError,
    ModelNotFoundError,
    UnavailableError,
)
from loraplex.gateway.names import NameIndex
from loraplex.gateway.resolution import Caller, Resolved, canary_bucket, find_listed, find_part, resolve
from loraplex_registry.wire.adapter import AdapterName, BaseName, NamesDelta, Target, VersionName

BASE = "tiny-base"
ALL = Caller(tenant=None, bases=None)
TEAM_X = Caller(tenant="team-x", bases=None)


def digest(seed: str) -> str:
    return "sha256:" + hashlib.sha256(seed.encode()).hexdigest()


def version(number: int, state: str = "ready", content: str | None = None) -> VersionName:
    return VersionName(number, content or digest(f"v{number}"), state, BASE, "lora", 8)


def adapter(
    name: str = "default",
    tenant: str = "team-x",
    versions: tuple[VersionName, ...] = (version(1),),
    aliases: dict[str, tuple[Target, ...]] | None = None,
    **changes: Any,
) -> AdapterName:
    aliases = {"live": (Target(versions[-1].number, 100),)} if aliases is None else aliases
    fields: dict[str, Any] = {
        "adapter_id": f"id-{tenant}-{name}",
        "tenant_id": f"id-{tenant}",
        "tenant": tenant,
        "name": name,
        "base": BASE,
        "is_default": name == "default",
        "deleted": False,
        "versions": versions,
        "aliases": aliases,
        "alias_ids": {alias: f"alias-{tenant}-{name}-{alias}" for alias in aliases},
    }
    return AdapterName(**{**fields, **changes})


def find_tenant_id(name: str) -> str:
    return f"id-{name}"


async def build_index(*adapters: AdapterName) -> NameIndex:
    base = BaseName(
        name=BASE,
        accepted_names=("org/Tiny-Base",),
        fingerprint="f",
        weights_digest="w",
        max_lora_rank=64,
        default_context=512,
    )

    async def fetch(since: int) -> NamesDelta:
        return NamesDelta(epoch=1, adapters=adapters, bases=(base,))

    index = NameIndex(fetch, lambda: 1, find_tenant_id)
    await index.ensure_fresh()
    return index


async def test_every_form_of_a_name_gives_the_same_version() -> None:
    index = await build_index(adapter(versions=(version(1), version(2))))
    full = digest("v2")
    for model in ("team-x", "team-x/default", "team-x/default@live", "team-x/default@2", f"team-x/default@{full}"):
        found = resolve(model, TEAM_X, index, "key")
        assert (found.full_name, found.digest) == ("team-x/default@2", full)
    assert resolve(f"team-x/default@{full[:19]}", TEAM_X, index, "key").digest == full


@pytest.mark.parametrize(
    "model",
    [
        "",
        " team-x",
        "team-x ",
        "Team-X",
        "TEAM-X",
        "team-y",
        "team-x/",
        "/team-x",
        "team-x//default",
        "team-x/default/",
        "team-x/default@",
        "team-x@live",
        "team-x/default@0",
        "team-x/default@01",
        "team-x/default@+1",
        "team-x/default@Live",
        "team-x/default@1\n",
        "team-x/default@sha256:abc",
        "team-x/default@sha256:" + "A" * 64,
        "team-x/default@sha256:" + "0" * 65,
        "team-x/other",
        "team-x/default@9",
        "team-x/default@canary",
        "team-\u0445",
        "tiny-base/default",
        "org/Tiny-Base",
        "Tiny-Base",
        "..",
        "team-x/../team-x",
        "a" * 100_000,
    ],
)
async def test_any_other_text_is_not_found(model: str) -> None:
    index = await build_index(adapter())
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(model, TEAM_X, index, "key")
    assert caught.value.param == "model"
    assert caught.value.message.isascii()
    assert len(caught.value.message) < 1200


async def test_another_tenants_name_is_as_unknown_as_one_that_does_not_exist() -> None:
    index = await build_index(adapter(tenant="team-y"))
    with pytest.raises(ModelNotFoundError) as foreign:
        resolve("team-y", TEAM_X, index, "key")
    with pytest.raises(ModelNotFoundError) as unknown:
        resolve("team-z", TEAM_X, index, "key")
    assert foreign.value.message.replace("team-y", "team-z") == unknown.value.message
    assert resolve("team-y", ALL, index, "key").full_name == "team-y/default@1"


@pytest.mark.parametrize(
    ("own", "model", "todo"),
    [
        ((), "team-x", "The tenant team-x has no adapter yet; upload one.* push FOLDER --as team-x`"),
        (
            (adapter("a"), adapter("b")),
            "team-x",
            "The tenant team-x has no default adapter; name one, as in team-x/a",
        ),
        (
            (adapter("a", versions=(version(1), version(2)), aliases={}),),
            "team-x/a",
            "The adapter team-x/a has no live version; promote one.* promote team-x/a@2`",
        ),
        (
            (adapter("a", versions=(version(1, "retired"),), aliases={}),),
            "team-x/a@live",
            "The adapter team-x/a has no live version; upload one.* --as team-x/a`",
        ),
        ((adapter("a"),), "team-x/b", "The model 'team-x/b' does not exist, or"),
        (
            (adapter("a", versions=(version(1), version(2, "retired"))),),
            "team-x/a@9",
            "^The adapter team-x/a has no version 9; the newest that is ready is team-x/a@1$",
        ),
        ((adapter("a", versions=(version(1, "purged"),)),), "team-x/a@2", "^The adapter team-x/a has no version 2$"),
        ((adapter("a"),), "team-x/a@canary", "^The adapter team-x/a has no alias canary; the newest .* team-x/a@1$"),
        (
            (adapter("a"),),
            "team-x/a@sha256:000000000000",
            "^The adapter team-x/a has no version whose digest begins with sha256:000000000000; the newest ",
        ),
    ],
)
async def test_an_own_name_without_a_live_version_says_what_to_do(
    own: tuple[AdapterName, ...], model: str, todo: str
) -> None:
    index = await build_index(*own)
    for caller in (TEAM_X, ALL):
        with pytest.raises(ModelNotFoundError, match=todo):
            resolve(model, caller, index, "key")
    with pytest.raises(ModelNotFoundError, match="does not exist, or this key may not call it"):
        resolve(model, Caller("team-y", None), index, "key")


async def test_a_base_needs_to_be_allowed() -> None:
    index = await build_index()
    assert resolve(BASE, TEAM_X, index, "key").full_name == BASE
    assert resolve(BASE, TEAM_X, index, "key").digest is None
    with pytest.raises(ModelNotFoundError):
        resolve(BASE, Caller("team-x", ("other-base",)), index, "key")


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("quarantined", AdapterQuarantinedError),
        ("retired", AdapterRetiredError),
        ("purged", AdapterRetiredError),
        ("validating", AdapterLoadingError),
    ],
)
async def test_a_version_that_does_not_serve_says_why(state: str, error: type[Exception]) -> None:
    index = await build_index(adapter(versions=(version(1, state), version(2)), aliases={"live": (Target(2, 100),)}))
    with pytest.raises(error):
        resolve("team-x/default@1", TEAM_X, index, "key")
    assert resolve("team-x", TEAM_X, index, "key").full_name == "team-x/default@2"


async def test_a_first_version_on_its_way_answers_for_the_name() -> None:
    index = await build_index(adapter(versions=(version(1, "validating"),), aliases={}, is_default=False))
    for model in ("team-x", "team-x/default"):
        with pytest.raises(AdapterLoadingError):
            resolve(model, TEAM_X, index, "key")


async def test_a_later_version_on_its_way_answers_while_nothing_is_live() -> None:
    versions = (version(1, "quarantined"), version(2, "validating"), version(3, "retired"))
    index = await build_index(adapter(versions=versions, aliases={}))
    with pytest.raises(AdapterLoadingError, match="version 2 is still being validated"):
        resolve("team-x", TEAM_X, index, "key")
    index = await build_index(adapter(versions=versions, aliases={"live": (Target(1, 100),)}))
    with pytest.raises(AdapterQuarantinedError):
        resolve("team-x", TEAM_X, index, "key")


async def test_what_is_purged_cannot_be_restored() -> None:
    index = await build_index(adapter(versions=(version(1, "purged"), version(2)), aliases={"live": (Target(2, 100),)}))
    with pytest.raises(AdapterRetiredError, match="version 1 is purged; upload it again or call another"):
        resolve("team-x/default@1", TEAM_X, index, "key")


@pytest.mark.parametrize("state", ["retired", "purged"])
async def test_a_full_fine_tune_that_was_closed_is_not_advised_to_be_restored(state: str) -> None:
    full = msgspec.structs.replace(version(2, state), kind="full", pool="team-x-full")
    index = await build_index(adapter(versions=(version(1), full), aliases={"live": (Target(1, 100),)}))
    with pytest.raises(AdapterRetiredError, match="its escalation is closed: call another, or open a new") as caught:
        resolve("team-x/default@2", TEAM_X, index, "key")
    assert "restore" not in caught.value.message


async def test_a_ready_version_that_was_never_promoted_is_not_live() -> None:
    index = await build_index(adapter(aliases={}, is_default=False))
    with pytest.raises(ModelNotFoundError):
        resolve("team-x", TEAM_X, index, "key")
    assert resolve("team-x/default@1", TEAM_X, index, "key").version == version(1)


async def test_a_live_adapter_is_no_substitute_for_a_deleted_default() -> None:
    index = await build_index(adapter("other", is_default=False))
    with pytest.raises(ModelNotFoundError):
        resolve("team-x", TEAM_X, index, "key")
    assert resolve("team-x/other", TEAM_X, index, "key").full_name == "team-x/other@1"


@pytest.mark.parametrize("caller", [TEAM_X, ALL])
async def test_what_a_former_tenant_of_the_name_left_answers_for_nobody(caller: Caller) -> None:
    index = await build_index(adapter(tenant_id="id-of-the-former"), adapter("mine", is_default=False, aliases={}))
    for model in ("team-x", "team-x/default", "team-x/default@1"):
        with pytest.raises(ModelNotFoundError):
            resolve(model, caller, index, "key")
    assert resolve("team-x/mine@1", caller, index, "key").full_name == "team-x/mine@1"
    assert [found.name for found in index.adapters()] == ["mine"]


async def test_a_prefix_that_fits_two_contents_is_not_found() -> None:
    one, two = "sha256:" + "ab" * 6 + "0" * 52, "sha256:" + "ab" * 6 + "1" * 52
    index = await build_index(adapter(versions=(version(1, content=one), version(2, content=two))))
    with pytest.raises(ModelNotFoundError, match="has several contents whose digest begins with sha256:abab"):
        resolve("team-x/default@sha256:" + "ab" * 6, TEAM_X, index, "key")
    assert resolve("team-x/default@sha256:" + "ab" * 6 + "1", TEAM_X, index, "key").digest == two


async def test_canary_buckets_follow_the_documented_hash() -> None:
    expected = int.from_bytes(hashlib.sha256(b"aliaskey").digest()[:8], "big") % 10_000
    assert canary_bucket("alias", "key") == expected


async def test_a_growing_canary_keeps_those_it_had() -> None:
    keys = [f"user-{i}" for i in range(2000)]
    indices = {
        weight: await build_index(
            adapter(versions=(version(1), version(2)), aliases={"live": (Target(2, weight), Target(1, 100 - weight))})
        )
        for weight in (10, 20)
    }
    ten, twenty = (
        {key for key in keys if resolve("team-x", TEAM_X, index, key).full_name == "team-x/default@2"}
        for index in indices.values()
    )
    assert ten < twenty
    assert abs(len(ten) - 200) < 60
    assert abs(len(twenty) - 400) < 80


async def test_a_deleted_or_renamed_adapter_stops_resolving() -> None:
    deltas = [
        NamesDelta(epoch=1, adapters=(adapter(), adapter("second")), bases=()),
        NamesDelta(
            epoch=2, adapters=(adapter(deleted=True), adapter("third", adapter_id="id-team-x-second")), bases=()
        ),
    ]
    epoch = 1

    async def fetch(since: int) -> NamesDelta:
        return deltas[since if since < 2 else 1]

    index = NameIndex(fetch, lambda: epoch, find_tenant_id)
    await index.ensure_fresh()
    assert [found.name for found in index.adapters()] == ["default", "second"]
    epoch = 2
    await index.ensure_fresh()
    assert [found.name for found in index.adapters()] == ["third"]


async def test_a_request_after_a_change_sees_it_and_one_fetch_serves_many() -> None:
    fetched: list[int] = []

    async def fetch(since: int) -> NamesDelta:
        fetched.append(since)
        return NamesDelta(epoch=epoch, adapters=(), bases=())

    epoch = 5
    index = NameIndex(fetch, lambda: epoch, find_tenant_id)
    for _ in range(3):
        await index.ensure_fresh()
    epoch = 6
    await index.ensure_fresh()
    await index.ensure_fresh()
    assert fetched == [0, 5]


async def test_only_the_first_reading_of_all_names_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(since: int) -> NamesDelta:
        await asyncio.sleep(takes_s)
        return NamesDelta(epoch=epoch, adapters=(adapter(),), bases=())

    epoch, takes_s = 5, 0.2
    index = NameIndex(fetch, lambda: epoch, find_tenant_id)
    monkeypatch.setattr("loraplex.gateway.names._REFRESH_TIMEOUT_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr("loraplex.gateway.names._FIRST_TIMEOUT_S", 0.05)
        with pytest.raises(UnavailableError, match="in time"):
            await index.ensure_fresh()
    assert not index.is_loaded
    await index.ensure_fresh()
    assert index.is_loaded
    # an old name is not served instead
    epoch = 6
    with pytest.raises(UnavailableError, match="in time"):
        await index.ensure_fresh()
    takes_s = 0.0
    await index.ensure_fresh()


@pytest.mark.parametrize(
    ("states", "weights", "listed"),
    [
        (("ready", "ready"), (90, 10), 1),
        (("ready", "ready"), (10, 90), 2),
        (("ready", "ready"), (50, 50), 1),
        (("quarantined", "ready"), (90, 10), 2),
        (("ready", "quarantined"), (10, 90), 1),
        (("quarantined", "quarantined"), (90, 10), None),
    ],
)
def test_a_canary_is_listed_while_some_of_its_calls_are_answered(
    states: tuple[str, str], weights: tuple[int, int], listed: int | None
) -> None:
    targets = tuple(Target(number, weight) for number, weight in zip((1, 2), weights, strict=True))
    versions = tuple(version(number, state) for number, state in zip((1, 2), states, strict=True))
    found = find_listed(adapter(versions=versions, aliases={"live": targets}))
    assert (found and found.number) == listed


def test_an_adapter_without_a_live_version_is_not_listed() -> None:
    assert find_listed(adapter(aliases={})) is None


@pytest.mark.parametrize(
    ("weights", "number", "expected"),
    [
        ({1: 90, 2: 10}, 1, "main"),
        ({1: 90, 2: 10}, 2, "canary"),
        ({1: 90, 2: 10}, 3, None),
        ({1: 100}, 1, None),
        ({1: 100, 2: 0}, 2, None),
    ],
)
def test_versions_that_share_the_live_alias_have_parts_in_it(
    weights: dict[int, int], number: int, expected: str | None
) -> None:
    targets = tuple(Target(*pair) for pair in weights.items())
    found = adapter(versions=(version(1), version(2), version(3)), aliases={"live": targets})
    assert find_part(Resolved("base", found, version(number))) == expected
    assert find_part(Resolved("base")) is None
