"""The clients that others use against the real gateway: the engines' artifact client and the official OpenAI client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from gateway_world import BASE, GatewayWorld, running_world
from loraplex_registry.wire.client import ArtifactClient, ArtifactMissingError


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as running:
        await running.create_tenant("team-x")
        yield running


@pytest.fixture
async def client(world: GatewayWorld) -> AsyncIterator[openai.AsyncOpenAI]:
    key = await world.create_key("team-x")
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0) as found:
        yield found


async def test_an_engine_reads_an_artifact_by_its_digest(world: GatewayWorld, tmp_path: Path) -> None:
    digest = (await world.push("team-x"))["digest"]
    artifacts = ArtifactClient(world.url, "the-engine-key")
    try:
        manifest = await asyncio.to_thread(artifacts.manifest, digest)
        assert manifest.digest == digest
        for file in manifest.files:
            size = await asyncio.to_thread(artifacts.fetch_file, digest, file.name, tmp_path / "file")
            assert size == file.size
        with pytest.raises(ArtifactMissingError):
            await asyncio.to_thread(artifacts.manifest, "sha256:" + "0" * 64)
    finally:
        artifacts.close()


async def test_the_openai_client_lists_and_finds_models(world: GatewayWorld, client: openai.AsyncOpenAI) -> None:
    await world.push("team-x")
    assert [model.id async for model in client.models.list()] == [BASE, "team-x"]
    assert (await client.models.retrieve("team-x/default@1")).id == "team-x/default@1"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("team-y")


async def test_the_openai_client_streams_to_the_end(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=BASE, prompt="answer", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "t0t1t2t3t4"


async def test_the_openai_client_raises_on_a_failure_in_the_middle(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=BASE, prompt="die", stream=True)
    with pytest.raises(openai.APIError, match="engine"):
        async for _ in stream:
            pass


async def test_the_openai_client_understands_refusals(world: GatewayWorld, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="team-y", prompt="answer")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.RateLimitError) as full:
        await client.completions.create(model=BASE, prompt="refuse")
    assert full.value.code == "queue_full"
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="wrong", max_retries=0) as nobody:
        with pytest.raises(openai.AuthenticationError):
            await nobody.models.list()
