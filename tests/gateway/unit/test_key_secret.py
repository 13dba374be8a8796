"""The text form of API keys and what verification computes from it."""

from __future__ import annotations

import re

import pytest

from loraplex.keys.secret import hmac_secret, is_same_secret, new_key_text, parse_key

PEPPER = b"pepper"


def test_new_keys_have_the_documented_form_and_never_repeat() -> None:
    keys = {new_key_text() for _ in range(200)}
    assert len(keys) == 200
    assert all(re.fullmatch(r"lpx_[0-9A-Za-z]{10}_[0-9A-Za-z]{49}", key) for key in keys)


def test_parse_splits_id_and_secret() -> None:
    text = new_key_text()
    parsed = parse_key(text, PEPPER)
    assert (parsed.lookup, parsed.secret) == (text[4:14], text[15:58])


@pytest.mark.parametrize("position", [3, 5, 20, 60])
def test_a_changed_character_never_finds_the_key_it_was(position: int) -> None:
    text = new_key_text()
    changed = text[:position] + ("a" if text[position] != "a" else "b") + text[position + 1 :]
    original, other = parse_key(text, PEPPER), parse_key(changed, PEPPER)
    assert (other.lookup, other.secret) != (original.lookup, original.secret)


def test_a_foreign_text_is_found_by_a_keyed_hash_of_itself() -> None:
    first, again = parse_key("an-operators-own-key", PEPPER), parse_key("an-operators-own-key", PEPPER)
    assert first == again
    assert first.lookup != parse_key("an-operators-own-key", b"other").lookup
    assert "operator" not in first.lookup


@pytest.mark.parametrize("text", ["", "lpx_", "lpx_ü" * 20, "\udcff", "x" * 5000])
def test_any_text_can_be_parsed(text: str) -> None:
    assert len(parse_key(text, PEPPER).lookup) <= 32


def test_secrets_compare_by_their_hmac() -> None:
    stored = hmac_secret("secret", PEPPER)
    assert is_same_secret("secret", PEPPER, stored)
    assert not is_same_secret("Secret", PEPPER, stored)
    assert not is_same_secret("secret", b"other pepper", stored)


def test_repr_shows_no_secret() -> None:
    text = new_key_text()
    assert text[15:58] not in repr(parse_key(text, PEPPER))
