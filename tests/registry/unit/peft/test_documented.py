from __future__ import annotations

from pathlib import Path

import pytest

from loraplex_registry.peft.field_rule import BASE_CHANGING_INITS, KNOWN_FIELDS, PLAIN_INITS
from loraplex_registry.peft.file_rule import CONVERT_COMMAND
from loraplex_registry.peft.report import CHECK_NAMES

PAGE = (Path(__file__).parents[4] / "docs" / "adapters.md").read_text(encoding="utf-8")
CHECKS = PAGE.partition("\n## Checks\n")[2]


@pytest.mark.parametrize("name", CHECK_NAMES)
def test_every_check_is_in_the_table_of_the_page(name: str) -> None:
    assert f"\n| `{name}` | " in CHECKS


@pytest.mark.parametrize("name", sorted([*KNOWN_FIELDS, *PLAIN_INITS, *BASE_CHANGING_INITS]))
def test_every_field_and_initialisation_is_on_the_page(name: str) -> None:
    assert name in PAGE


def test_the_command_that_converts_a_pickle_is_on_the_page() -> None:
    assert CONVERT_COMMAND in PAGE


def test_checks_are_listed_in_the_order_of_a_report() -> None:
    places = [CHECKS.index(f"\n| `{name}` | ") for name in CHECK_NAMES]
    assert places == sorted(places)
