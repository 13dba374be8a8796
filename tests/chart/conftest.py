"""The chart's renderings, each made once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chart_tools import ToolUnavailable, find_helm
from chart_values import CASES
from chart_world import Rendering, template, write_values
from conftest import skip_or_fail

Render = Callable[[str, int], Rendering]


@pytest.fixture(scope="session")
def find_program() -> Callable[[int], Path]:
    """Helm of a major version."""

    def find(major: int) -> Path:
        try:
            return find_helm(major)
        except ToolUnavailable as reason:
            skip_or_fail("helm", str(reason))

    return find


@pytest.fixture(scope="session")
def helm(find_program: Callable[[int], Path]) -> Path:
    """The newest helm."""
    return find_program(4)


@pytest.fixture(scope="session")
def case_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The values file of a case."""

    def find(name: str) -> Path:
        given = CASES[name]
        return given if isinstance(given, Path) else write_values(tmp_path_factory.mktemp("values"), given)

    return find


@pytest.fixture(scope="session")
def render(find_program: Callable[[int], Path], case_file: Callable[[str], Path]) -> Render:
    """What helm of a major version makes of a case."""
    known: dict[tuple[str, int], Rendering] = {}

    def find(name: str, major: int = 4) -> Rendering:
        if (name, major) not in known:
            known[name, major] = Rendering(name, template(find_program(major), case_file(name)))
        return known[name, major]

    return find


@pytest.fixture(params=sorted(CASES))
def rendering(request: pytest.FixtureRequest, render: Callable[[str], Rendering]) -> Rendering:
    """Each case once."""
    return render(request.param)
