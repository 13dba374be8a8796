"""One platform for all cases about OpenAI's API."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from case_world import Cases
from openai_world import ALL_DOORS, Door, OpenAIWorld, running_openai_world

HERE = Path(__file__).parent
_open = ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the platform with the last test that may use it: an idle one holds memory and a part of a core."""
    if nextitem is None or HERE not in nextitem.path.parents:
        _open.close()


@pytest.fixture(scope="session")
def world(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> OpenAIWorld:
    """A platform that serves a tiny base and an adapter of it."""
    return _open.enter_context(running_openai_world(cases, tmp_path_factory.mktemp("cases-openai") / "data"))


@pytest.fixture(params=ALL_DOORS, ids=str)
def door(request: pytest.FixtureRequest) -> Door:
    """Each way to ask in turn."""
    chosen: Door = request.param
    return chosen
