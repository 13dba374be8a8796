"""Tenants and keys on both databases: what is written, and that the directory learns exactly what changed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from loraplex.audit.trail import EventQuery, list_events
from loraplex.db.database import Database
from loraplex.db.revision import REVISION, check_revision
from loraplex.db.tables import api_key, tenant
from loraplex.errors import (
    AuthenticationError,
    ConflictError,
    DatabaseRevisionError,
    InvalidRequestError,
    NameReservedError,
    NotFoundError,
    PermissionDeniedError,
    TenantSuspendedError,
)
from loraplex.gateway.authentication import Authenticator
from loraplex.gateway.directory import Directory
from loraplex.keys.secret import new_key_text
from loraplex.keys.service import KeyChange, KeyService, NewKey, list_keys
from loraplex.tenants.service import TenantService, list_tenants
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.limits import RATE_LIMITS, RateLimits

PEPPER = b"pepper"


def identity(role: str = "admin", **changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "role": role,
        "tenant_id": None,
        "tenant": None,
        "scopes": (),
        "key_id": "key_test",
        "actor": "ada",
        "request_id": "req_test",
    }
    return Identity(**{**fields, **changes})


ADMIN = identity()


class World:
    """Services over one database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.tenants = TenantService(database)
        self.keys = KeyService(database, PEPPER)
        self.directory = Directory(database)
        self.authenticator = Authenticator(self.directory, PEPPER)

    async def tenant_id(self, name: str = "team-x") -> uuid.UUID:
        row = await self.tenants.create_tenant(ADMIN, name, None, None, None)
        await self.directory.refresh()
        found: uuid.UUID = row["id"]
        return found

    async def key(self, tenant_id: uuid.UUID, by: Identity = ADMIN, **changes: Any) -> tuple[dict[str, Any], str]:
        fields: dict[str, Any] = {"name": "k", "owner": "o", "scopes": ["infer"], "role": "tenant", "expires_at": None}
        created = await self.keys.create_key(by, tenant_id, "team-x", NewKey(**fields | changes))
        await self.directory.refresh()
        return created

    def who(self, text: str | None) -> Identity:
        return self.authenticator.authenticate(None if text is None else f"Bearer {text}", "req_1")


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    database = Database(database_url)
    yield World(database)
    await database.close()


async def test_a_key_opens_its_tenant_and_its_text_is_nowhere(world: World) -> None:
    tenant_id = await world.tenant_id()
    row, text = await world.key(tenant_id)
    who = world.who(text)
    assert (who.role, who.tenant, who.tenant_id, who.scopes) == ("tenant", "team-x", str(tenant_id), ("infer",))
    assert (who.key_id, who.actor, who.request_id) == (row["public_id"], "o", "req_1")
    async with world.database.read() as connection:
        stored = str((await connection.execute(sa.select(api_key))).all())
    assert text[15:58] not in stored
    assert text[15:58] not in repr(world.directory.find_key(text[4:14]))


@pytest.mark.parametrize("text", [None, "", "x", new_key_text()], ids=["none", "empty", "foreign", "unknown"])
async def test_no_key_and_unknown_keys_are_one_error(world: World, text: str | None) -> None:
    with pytest.raises(AuthenticationError) as caught:
        world.who(text)
    assert str(caught.value) == str(AuthenticationError())


async def test_a_key_that_was_cut_or_mistyped_is_told_so_and_no_more(world: World) -> None:
    _, text = await world.key(await world.tenant_id())
    last = "0" if text[-1] != "0" else "1"
    for broken in (text[:-1], text + "0", text[:-1] + last, text[:20] + text[21:22] + text[20:21] + text[22:], "lpx_"):
        if broken != text:
            with pytest.raises(AuthenticationError, match="not a whole API key"):
                world.who(broken)


async def test_a_right_id_with_a_wrong_secret_opens_nothing(world: World) -> None:
    _, text = await world.key(await world.tenant_id())
    other = new_key_text()
    with pytest.raises(AuthenticationError):
        world.who(text[:15] + other[15:])


async def test_revoked_and_expired_keys_die_at_once(world: World) -> None:
    tenant_id = await world.tenant_id()
    row, text = await world.key(tenant_id)
    await world.keys.revoke_key(ADMIN, tenant_id=tenant_id, tenant="team-x", key_id=row["public_id"])
    await world.directory.refresh()
    with pytest.raises(AuthenticationError, match="revoked"):
        world.who(text)
    _, brief = await world.key(tenant_id, expires_at=datetime.now(UTC) + timedelta(seconds=2))
    assert world.who(brief)
    await asyncio.sleep(2.01)
    with pytest.raises(AuthenticationError, match="expired"):
        world.who(brief)


async def test_suspension_and_deletion_reach_the_keys(world: World) -> None:
    tenant_id = await world.tenant_id()
    _, text = await world.key(tenant_id)
    await world.tenants.change_tenant(ADMIN, tenant_id, {"state": "suspended"})
    await world.directory.refresh()
    with pytest.raises(TenantSuspendedError):
        world.who(text)
    await world.tenants.change_tenant(ADMIN, tenant_id, {"state": "active"})
    await world.directory.refresh()
    assert world.who(text)
    await world.tenants.delete_tenant(ADMIN, tenant_id)
    await world.directory.refresh()
    with pytest.raises(AuthenticationError):
        world.who(text)
    assert world.directory.find_tenant("team-x") is None


async def test_names_of_tenants_are_unique_and_stay_reserved(world: World) -> None:
    tenant_id = await world.tenant_id()
    with pytest.raises(ConflictError):
        await world.tenant_id()
    with pytest.raises(NameReservedError):
        await world.tenant_id("platform")
    await world.tenants.delete_tenant(ADMIN, tenant_id)
    with pytest.raises(NameReservedError, match="reserved until"):
        await world.tenant_id()
    long_ago = datetime.now(UTC) - timedelta(days=31)
    async with world.database.write() as connection:
        await connection.execute(sa.update(tenant).values(deleted_at=long_ago))
    assert await world.tenant_id() != tenant_id


async def test_two_creations_at_once_give_one_tenant(world: World) -> None:
    results = await asyncio.gather(*(world.tenant_id() for _ in range(5)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["ConflictError"] * 4 + ["UUID"]


async def test_a_key_gives_no_more_than_it_has(world: World) -> None:
    tenant_id = await world.tenant_id()
    _, text = await world.key(tenant_id, scopes=["infer", "keys:write"])
    by = world.who(text)
    await world.key(tenant_id, by)
    with pytest.raises(PermissionDeniedError):
        await world.key(tenant_id, by, scopes=["adapters:write"])
    with pytest.raises(PermissionDeniedError):
        await world.key(tenant_id, by, role="admin", scopes=[])
    with pytest.raises(PermissionDeniedError):
        await world.key(tenant_id, identity("admin_readonly"), scopes=["infer"])
    for bad in ({"scopes": ["everything"]}, {"role": "root"}, {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}):
        with pytest.raises(InvalidRequestError):
            await world.key(tenant_id, **bad)


async def test_a_key_that_is_rotated_and_revoked_at_the_same_moment_ends_dead(world: World) -> None:
    tenant_id = await world.tenant_id()
    row, text = await world.key(tenant_id, limits={"tokens_per_day": 5}, priority=2)
    key_id = row["public_id"]
    rotations = [
        world.keys.rotate_key(ADMIN, tenant_id, "team-x", key_id, 3600, expires_at=msgspec.UNSET) for _ in range(3)
    ]
    revocation = world.keys.revoke_key(ADMIN, tenant_id=tenant_id, tenant="team-x", key_id=key_id)
    *made, _ = await asyncio.gather(*rotations, revocation, return_exceptions=True)
    await world.directory.refresh()
    with pytest.raises(AuthenticationError, match="revoked"):
        world.who(text)
    for one in made:
        # after the revocation there was nothing to rotate
        if isinstance(one, BaseException):
            assert isinstance(one, ConflictError)
            continue
        assert (one[0]["limits"], one[0]["priority"], one[0]["rotated_from"]) == ({"tokens_per_day": 5}, 2, key_id)
        assert world.who(one[1]).key_id == one[0]["public_id"]


async def test_changes_of_one_key_at_the_same_moment_are_all_there(world: World) -> None:
    tenant_id = await world.tenant_id()
    row, _ = await world.key(tenant_id)
    changes = [KeyChange(limits={name: 7}) for name in RATE_LIMITS] + [KeyChange(priority=3)]
    await asyncio.gather(
        *(world.keys.change_key(ADMIN, tenant_id, "team-x", row["public_id"], change) for change in changes)
    )
    await world.directory.refresh()
    entry = world.directory.find_key_by_id(row["public_id"])
    assert entry is not None
    assert (entry.rate_limits, entry.priority) == (RateLimits(**dict.fromkeys(RATE_LIMITS, 7)), 3)


async def test_platform_keys_are_not_their_tenants_business(world: World) -> None:
    tenant_id = await world.tenant_id()
    row, text = await world.key(tenant_id, role="admin_readonly", scopes=[])
    assert (world.who(text).role, world.who(text).tenant) == ("admin_readonly", None)
    by = identity("tenant", tenant="team-x", tenant_id=str(tenant_id), scopes=("keys:write",))
    assert await list_keys(world.database, by, tenant_id, None, 10) == []
    with pytest.raises(NotFoundError):
        await world.keys.revoke_key(by, tenant_id=tenant_id, tenant="team-x", key_id=row["public_id"])
    assert [found["public_id"] for found in await list_keys(world.database, ADMIN, tenant_id, None, 10)] == [
        row["public_id"]
    ]


async def test_the_bootstrap_key_is_one_and_can_be_replaced(world: World) -> None:
    for text in ("first-admin-key-000", "first-admin-key-000", "second-admin-key-00", "first-admin-key-000"):
        await world.keys.ensure_bootstrap_key(text)
    await world.directory.refresh()
    assert world.who("first-admin-key-000").is_admin
    with pytest.raises(AuthenticationError):
        world.who("second-admin-key-00")


async def test_the_directory_reads_only_what_changed(world: World) -> None:
    await world.tenant_id("team-a")
    read: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        read.append(statement)

    sa.event.listen(world.database.engine.sync_engine, "before_cursor_execute", note)
    await world.tenant_id("team-b")
    assert {"team-a", "team-b"} <= {
        found.name for name in ("team-a", "team-b") if (found := world.directory.find_tenant(name))
    }
    assert sum("changed_epoch >" in statement for statement in read) == 2


async def test_lists_are_newest_first_and_events_tell_who_did_it(world: World) -> None:
    ids = [await world.tenant_id(name) for name in ("team-a", "team-b", "team-c")]
    newest = await list_tenants(world.database, None, None, 2)
    assert [row["name"] for row in newest] == ["team-c", "team-b"]
    older = await list_tenants(world.database, None, ids[1], 2)
    assert [row["name"] for row in older] == ["team-a"]
    events = await list_events(world.database, EventQuery(tenant_id=str(ids[0])), None, 10)
    assert [(event["action"], event["actor"], event["tenant"]) for event in events] == [
        ("tenant.created", "ada", "team-a")
    ]


async def test_a_schema_that_does_not_serve_this_program_is_refused(world: World, empty_database_url: str) -> None:
    await check_revision(world.database)
    async with world.database.write() as connection:
        await connection.execute(sa.text("DELETE FROM compatible_revision WHERE revision = :r"), {"r": REVISION})
    with pytest.raises(DatabaseRevisionError, match="db upgrade"):
        await check_revision(world.database)
    empty = Database(empty_database_url)
    with pytest.raises(DatabaseRevisionError):
        await check_revision(empty)
    await empty.close()
