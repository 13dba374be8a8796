"""`kill -9` of the gateway at random instants: what was acknowledged is there, what was not is whole or not there."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from crash_world import ADAPTERS, TENANT, CrashWorld, LargePusher, find_gaps
from loraplex.client.management import Management
from loraplex_registry.db.database import Database
from loraplex_registry.db.model import UploadRow, VersionRow
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.storage.store import create_store
from loraplex_registry.uploads.sweep import Sweeper

WEIGHTS = "adapter_model.safetensors"
LONGEST_ROUND_S = 1.5
NUM_KILLS = {"sqlite": 1, "postgres": 1}
"""In a sample, by database."""
NUM_KILLS_IN_FULL = 50


@pytest.fixture(params=["sqlite and folder", "postgres and s3"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param).split()[0]


@pytest.fixture
def store_url(request: pytest.FixtureRequest, dialect: str, tmp_path: Path) -> str:
    return f"file://{tmp_path}/objects" if dialect == "sqlite" else str(request.getfixturevalue("s3_url"))


@pytest.fixture
def world(database_url: str, store_url: str, tmp_path: Path) -> Iterator[CrashWorld]:
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    world = CrashWorld(tmp_path, database_url, store_url, environ, seed=int.from_bytes(os.urandom(4)))
    try:
        yield world
    finally:
        world.stop()


@pytest.mark.endure
def test_nothing_acknowledged_is_lost_and_nothing_half_made_is_seen(
    world: CrashWorld, dialect: str, database_url: str, store_url: str, request: pytest.FixtureRequest
) -> None:
    is_full = request.config.getoption("--endure")
    if dialect == "sqlite" and not is_full:
        pytest.skip("what several parts share is killed at; SQLite and a folder only at full length")
    num_kills = NUM_KILLS_IN_FULL if is_full else NUM_KILLS[dialect]
    seen: set[tuple[str, int]] = set()
    world.start()
    world.prepare()
    with LargePusher(world) as large:
        for _ in range(num_kills):
            world.run_round(world.random.uniform(0.05, LONGEST_ROUND_S))
            world.start()
            with world.client() as client:
                check_all(world, client, seen)
        assert large.finish(120 if is_full else 3) or not is_full, "a large upload hangs"
        with world.client() as client:
            check_all(world, client, set())
    assert world.ledger.faults == []
    world.stop()
    check_nothing_is_left(database_url, store_url, asyncio.run(sweep(database_url, store_url)))
    ledger = world.ledger
    print(
        f"{num_kills} kills: {len(ledger.versions)} versions, {large.num_versions} of them in parts, "
        f"{len(ledger.moves)} moves of aliases acknowledged; {ledger.num_cut} requests and {large.num_cut} uploads cut"
    )


def check_all(world: CrashWorld, client: Management, seen: set[tuple[str, int]]) -> None:
    """Compare what is shown with what was acknowledged; the files of versions in `seen` were read before."""
    for adapter in ADAPTERS:
        check_versions(world, client, adapter, seen)
        check_aliases(world, client, adapter)


def check_versions(world: CrashWorld, client: Management, adapter: str, seen: set[tuple[str, int]]) -> None:
    with world.ledger.lock:
        acknowledged = {number: digest for (name, number), digest in world.ledger.versions.items() if name == adapter}
        states = {number: set(found) for (name, number), found in world.ledger.states.items() if name == adapter}
    versions = {version.version: version for version in client.list_versions(TENANT, adapter)}
    assert find_gaps(list(versions)) == []
    assert len({version.digest for version in versions.values()}) == len(versions), "a content is there twice"
    for number, digest in acknowledged.items():
        assert versions[number].digest == digest
        assert versions[number].state in states[number]
    for number, version in versions.items():
        assert version.state in ("ready", "retired")
        if (adapter, number) in seen:
            continue
        seen.add((adapter, number))
        folder = world.folder / "pulled" / adapter / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        client.download_all(version, folder, lambda _: None)
        assert hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest() in world.ledger.contents


def check_aliases(world: CrashWorld, client: Management, adapter: str) -> None:
    with world.ledger.lock:
        acknowledged = {
            revision: targets for (name, revision), targets in world.ledger.moves.items() if name == adapter
        }
    history = client.list_history(TENANT, adapter)
    revisions = [change.revision for change in history]
    assert revisions == list(range(len(revisions), 0, -1)), "the history has a gap or a fork"
    told = {change.revision: tuple(change.targets) for change in history}
    for revision, targets in acknowledged.items():
        assert told[revision] == targets
    live = client.get_alias(TENANT, adapter, "live")
    assert (live.revision, tuple(live.targets)) == (history[0].revision, tuple(history[0].targets))
    for target in live.targets:
        assert client.get_version(TENANT, adapter, target.version).state == "ready"


async def sweep(database_url: str, store_url: str) -> tuple[set[str], set[str], set[str], set[str]]:
    """Sweep without grace; return digests in the store and in rows, and uploads with parts and those that are open."""
    settings = RegistrySettings(database_url=database_url, object_store_url=store_url)
    database, store = Database(database_url), create_store(store_url)
    try:
        # negative: what was written in this very second goes, too
        await Sweeper(database, store, replace(settings, orphan_grace_s=-1.0)).sweep()
        async with database.read() as session:
            digests = set((await session.execute(sa.select(VersionRow.digest))).scalars())
            is_open = UploadRow.state.in_(("open", "completing"))
            open_uploads = set((await session.execute(sa.select(UploadRow.public_id).where(is_open))).scalars())
    finally:
        await database.close()
    stored = {digest for digest, _ in store.list_artifacts()}
    return stored, digests, {upload for upload, _ in store.list_uploads()}, open_uploads


def check_nothing_is_left(
    database_url: str, store_url: str, found: tuple[set[str], set[str], set[str], set[str]]
) -> None:
    stored, digests, uploads, open_uploads = found
    assert stored == digests
    assert uploads <= open_uploads
    if store_url.startswith("file:"):
        folder = Path(store_url.removeprefix("file://"))
        files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        assert {path.parts[0] for path in files} <= {"sha256", "staging"}
        places = {path.parts[1] for path in files if path.parts[0] == "staging"}
        assert places <= open_uploads
        hexes = {path.parts[3] for path in files if path.parts[0] == "sha256"}
        assert hexes == {digest.removeprefix("sha256:") for digest in digests}
