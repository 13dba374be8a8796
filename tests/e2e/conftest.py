"""One real platform for all end-to-end tests, with three teams; float32, and fewer slots than adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from platforms import LivePlatform, Team, create_team, running_platform

STYLES = ("pirate", "json", "legal")


@pytest.fixture(scope="session")
def platform(smollm2_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlatform]:
    """The platform, with two slots for three adapters and more."""
    data_dir = tmp_path_factory.mktemp("platform") / "data"
    with running_platform(data_dir, "--dtype", "float32", "--max-loras", "2", "--max-model-len", "512") as running:
        yield running


@pytest.fixture(scope="session")
def teams(platform: LivePlatform) -> dict[str, Team]:
    """Three teams by style, each with its example adapter live."""
    return {style: create_team(platform, f"team-{style}", style) for style in STYLES}
