"""Uploads are counted by how they ended, refusals by check, and trials not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_world import GatewayWorld, running_world


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as running:
        await running.create_tenant("team-x")
        yield running


@pytest.fixture
def dialect() -> str:
    return "sqlite"


async def read_counts(world: GatewayWorld) -> dict[str, float]:
    text = (await world.call("GET", "/metrics")).text
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("loraplex_upload")]
    return {name: float(value) for name, value in rows}


async def test_uploads_are_counted_by_how_they_ended(world: GatewayWorld) -> None:
    path = "/api/v1/tenants/team-x/adapters/default/versions"
    await world.push("team-x")
    files = world.last_files()
    num_bytes = sum(len(content) for _, (_, content) in files)
    assert (await world.call("POST", path, files=files)).status_code == 200
    bad = [*files, ("files", ("run.sh", b"echo")), ("files", ("weights.bin", b"x"))]
    assert (await world.call("POST", path, files=bad)).status_code == 422
    for tried in (files, bad):
        await world.call("POST", path, files=tried, params={"dry_run": "true"})
    counts = await read_counts(world)
    refusals = {name: value for name, value in counts.items() if name.startswith("loraplex_upload_refusals")}
    assert set(refusals.values()) == {1.0}
    assert refusals.keys() <= {f'loraplex_upload_refusals_total{{check="{name}"}}' for name in ("file_set", "pickle")}
    assert {name: value for name, value in counts.items() if name not in refusals} == {
        'loraplex_uploads_total{result="created"}': 1.0,
        'loraplex_uploads_total{result="known"}': 1.0,
        'loraplex_uploads_total{result="refused"}': 1.0,
        "loraplex_upload_bytes_total": 2.0 * num_bytes,
    }
