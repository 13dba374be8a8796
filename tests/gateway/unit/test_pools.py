"""Pools as an operator configures them."""

from __future__ import annotations

import pytest

from loraplex.errors import SettingsError
from loraplex.fleet.pools import Pin, Pool, parse_pools


def test_pools_are_parsed() -> None:
    text = '{"main": {"base": "base", "engines": ["http://127.0.0.1:8100/", "dns+http://engine:8100"]}}'
    assert parse_pools(text) == (Pool("main", "base", ("http://127.0.0.1:8100", "dns+http://engine:8100")),)
    assert parse_pools("{}") == ()


def test_a_pool_may_be_for_one_full_model() -> None:
    text = '{"full": {"model": "team-x-full", "engines": ["http://a:1"]}}'
    assert parse_pools(text) == (Pool("full", "", ("http://a:1",), "team-x-full"),)


def test_a_pool_says_what_is_always_loaded() -> None:
    text = '{"main": {"base": "b", "engines": [], "pin": ["team-x", {"model": "team-y/a@canary", "copies": 2}]}}'
    assert parse_pools(text)[0].pins == (Pin("team-x"), Pin("team-y/a@canary", 2))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "LORAPLEX_POOLS"),
        ("[]", "LORAPLEX_POOLS"),
        ('{"main": {"engines": []}}', "'base' or 'model'"),
        ('{"main": {"base": "b", "model": "m", "engines": []}}', "'base' or 'model'"),
        ('{"main": {"base": "b", "engines": "http://a"}}', "engines"),
        ('{"main": {"base": "b", "engines": ["ftp://a"]}}', "engines"),
        ('{"main": {"base": "b", "engines": [], "weight": 1}}', "weight"),
        ('{"main": {"model": "B", "engines": []}}', "'model' is the served name"),
        ('{"main": {"base": 3, "engines": []}}', "'base' is the served name"),
        ('{"Main": {"base": "b", "engines": []}}', "Main"),
        ('{"main": {"base": "b", "engines": [], "pin": "team-x"}}', "'pin' is a list"),
        ('{"main": {"base": "b", "engines": [], "pin": [{"name": "team-x"}]}}', "'pin' is a list"),
        ('{"main": {"base": "b", "engines": [], "pin": [""]}}', "no name"),
        ('{"main": {"base": "b", "engines": [], "pin": [{"model": "x", "copies": 0}]}}', "1 is the least"),
        ('{"main": {"base": "b", "engines": [], "pin": ["x", {"model": "x"}]}}', "twice"),
        ('{"main": {"model": "m", "engines": [], "pin": ["x"]}}', "nothing to pin"),
        ('{"one": {"base": "b", "engines": ["http://a"]}, "two": {"model": "m", "engines": ["http://a/"]}}', "twice"),
    ],
)
def test_a_bad_pool_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse_pools(text)
