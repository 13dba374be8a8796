from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_engine.server.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher, sent = StopMatcher(stops), []
    for piece in pieces:
        text, is_done = matcher.push(piece)
        sent.append(text)
        if is_done:
            return sent, True
    return [*sent, matcher.flush()], False


def naive(stops: list[str], text: str) -> tuple[str, bool]:
    """Scan by growing prefixes: the first that ends with a stop string ends the text."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            return text[: end - max(map(len, endings))], True
    return text, False


def test_a_prefix_of_a_stop_string_is_never_sent() -> None:
    assert run(["DEFGHIJ"], list("ABCDEFGHIJ")) == ([*"ABC", *[""] * 7], True)


def test_held_text_is_sent_as_soon_as_it_cannot_match() -> None:
    assert run(["DEX"], ["AB", "CDE", "F", "D"]) == (["AB", "C", "DEF", "", "D"], False)


def test_a_stop_string_across_pieces_is_seen() -> None:
    assert run(["two words", "\U0001f600!"], ["hi tw", "o wor", "ds after"]) == (["hi ", "", ""], True)


def test_the_stop_completed_first_wins() -> None:
    assert run(["ABCD", "BC"], ["xABCD"]) == (["xA"], True)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.lists(st.text("abc", max_size=4)))
def test_the_answer_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    sent, is_done = run(stops, pieces)
    assert ("".join(sent), is_done) == naive(stops, "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.text("abc", max_size=20))
def test_no_more_is_held_than_could_still_match(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    _, is_done = matcher.push(text)
    if not is_done:
        held = matcher.flush()
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_text_without_a_match_is_whole(stops: list[str]) -> None:
    sent, is_done = run(stops, ["never", "theless"] if not stops else ["neve", "theless"])
    assert "".join(sent).endswith("theless")
    assert is_done is False
