"""One real platform for all tests of this folder, with three teams; float32, and fewer slots than adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from folder_scheduling import PLATFORM, open_in
from platforms import LivePlatform, Team, create_team, running_platform

STYLES = ("pirate", "json", "legal")


@pytest.fixture(scope="session")
def platform(smollm2_base: Path, tmp_path_factory: pytest.TempPathFactory) -> LivePlatform:
    """The platform, with two slots for three adapters and more."""
    data_dir = tmp_path_factory.mktemp("platform") / "data"
    flags = ("--dtype", "float32", "--max-loras", "2", "--max-model-len", "512")
    return open_in(PLATFORM, running_platform(data_dir, *flags))


@pytest.fixture(scope="session")
def teams(platform: LivePlatform) -> dict[str, Team]:
    """Three teams by style, each with its example adapter live."""
    return {style: create_team(platform, f"team-{style}", style) for style in STYLES}
