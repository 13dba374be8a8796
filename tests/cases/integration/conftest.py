"""One platform for all cases about OpenAI's API."""

from __future__ import annotations

import pytest

from case_world import Cases
from folder_scheduling import CASES, open_in
from openai_world import ALL_DOORS, Door, OpenAIWorld, running_openai_world


@pytest.fixture(scope="session")
def world(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> OpenAIWorld:
    """A platform that serves a tiny base and an adapter of it."""
    return open_in(CASES, running_openai_world(cases, tmp_path_factory.mktemp("cases-openai") / "data"))


@pytest.fixture(params=ALL_DOORS, ids=str)
def door(request: pytest.FixtureRequest) -> Door:
    """Each way to ask in turn."""
    chosen: Door = request.param
    return chosen
