"""The rank limit is one: what `up` is told holds at upload, at load and in the choice of an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from loraplex.client.errors import ClientError
from loraplex.client.upload import list_files
from loraplex_engine.bases.pull import pull
from loraplex_registry.wire.adapter import VersionView
from platforms import LivePlatform, running_platform
from support import write_adapter

RANK = 128


@pytest.fixture
def adapter(tiny_llama: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", tiny_llama, rank=RANK)


def push(platform: LivePlatform, folder: Path, name: str) -> VersionView:
    with platform.management() as client:
        return client.push("team-x", name, list_files(folder), lambda _: None)


def complete(platform: LivePlatform, model: str) -> str:
    with platform.openai() as client:
        return client.completions.create(model=model, prompt="a b c", temperature=0, max_tokens=8).choices[0].text


def list_engine(platform: LivePlatform) -> Any:
    with platform.management() as client:
        (engine,) = client.list_fleet()
        return engine


@pytest.mark.endure
def test_a_higher_limit_serves_higher_ranks_and_a_lower_one_says_so(
    tiny_llama: Path, adapter: Path, tmp_path: Path, long: Callable[[float, float], float]
) -> None:
    flags = ("--base", str(pull(str(tiny_llama), tmp_path / "cache")), "--dtype", "float32")
    with running_platform(tmp_path / "data", *flags, "--max-lora-rank", str(RANK)) as platform:
        with platform.management() as client:
            client.create_tenant("team-x")
            (base,) = client.list_bases()
        assert push(platform, adapter, "high").rank == RANK
        assert complete(platform, "team-x/high") != complete(platform, base.name)
        assert list_engine(platform).state.model.max_lora_rank == RANK
    if not long(0, 1):
        # a second start: what a registry and an engine of a lower limit say has tests of its own
        return

    with running_platform(tmp_path / "data", *flags) as platform:
        with pytest.raises(ClientError) as refused:
            push(platform, adapter, "again")
        assert (refused.value.status, refused.value.code) == (422, "adapter_rejected")
        assert refused.value.report is not None
        assert [check.name for check in refused.value.report.checks if check.verdict == "fail"] == ["rank_limit"]
        with pytest.raises(openai.InternalServerError, match=f"--max-lora-rank {RANK}") as caught:
            complete(platform, "team-x/high")
        assert (caught.value.status_code, caught.value.code) == (503, "no_replica")
        assert complete(platform, base.name)
        assert list_engine(platform).state.failed == {}
