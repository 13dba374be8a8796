"""One real platform for all tests of this folder, with three teams; float32, and fewer slots than adapters."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from platforms import LivePlatform, Team, create_team, running_platform

STYLES = ("pirate", "json", "legal")
HERE = Path(__file__).parent
_open = ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the platform with the last test that may use it: an idle one holds a gigabyte and a part of a core."""
    if nextitem is None or HERE not in nextitem.path.parents:
        _open.close()


@pytest.fixture(scope="session")
def platform(smollm2_base: Path, tmp_path_factory: pytest.TempPathFactory) -> LivePlatform:
    """The platform, with two slots for three adapters and more."""
    data_dir = tmp_path_factory.mktemp("platform") / "data"
    flags = ("--dtype", "float32", "--max-loras", "2", "--max-model-len", "512")
    return _open.enter_context(running_platform(data_dir, *flags))


@pytest.fixture(scope="session")
def teams(platform: LivePlatform) -> dict[str, Team]:
    """Three teams by style, each with its example adapter live."""
    return {style: create_team(platform, f"team-{style}", style) for style in STYLES}
