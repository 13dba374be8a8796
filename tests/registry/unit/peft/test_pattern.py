from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_registry.peft import pattern as module
from loraplex_registry.peft.confined import Outcome
from loraplex_registry.peft.errors import PatternError
from loraplex_registry.peft.pattern import Pattern, is_plain, match_patterns

NAMES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(30) for name in "qkvo"]


def full(source: str) -> Pattern:
    return Pattern(source, source, is_full=True)


@pytest.mark.parametrize("source", [r"((.*)*)*x", r"(?:.*.*.*.*.*.*.*.*)y", r"(\w+\.?)+!"])
def test_a_catastrophic_expression_is_ended_in_bounded_time(source: str) -> None:
    begin = time.monotonic()
    with pytest.raises(PatternError, match="processor time"):
        match_patterns([full(source)], NAMES)
    assert time.monotonic() - begin < 60


def test_many_fairly_slow_expressions_share_one_bound() -> None:
    slow = [full(f"(?:.*?\\.)*.*.*.*{number}!") for number in range(4000)]
    begin = time.monotonic()
    with pytest.raises(PatternError, match=r"processor time"):
        match_patterns(slow, NAMES)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("source", ["(", "a{2,1}", "[z-a]", "(?P<x>a)(?P<x>b)", "*", "a{1,99999999999}", "\\"])
def test_an_invalid_expression_is_the_module_s_own_error(source: str) -> None:
    with pytest.raises(PatternError, match=r"valid|evaluated") as caught:
        match_patterns([full("ok.*"), full(source)], NAMES)
    assert caught.value.source == source


def test_length_and_number_of_expressions_are_limited() -> None:
    with pytest.raises(PatternError, match="longer"):
        match_patterns([full("a" * 513)], NAMES)
    with pytest.raises(PatternError, match="more than"):
        match_patterns([full("a")] * 4097, NAMES)


def test_answers_come_in_order_whichever_process_gave_them() -> None:
    patterns = [full(".*q_proj"), full(NAMES[0]), full(".*v_proj"), full("nothing")]
    found = match_patterns(patterns, NAMES)
    assert [len(matches) for matches in found] == [30, 1, 30, 0]


def test_a_named_group_is_returned() -> None:
    found = match_patterns(
        [Pattern("", r".*?\.[^.]*\.(?P<idx>\d+)\."), Pattern("(x|layers)", r".*\.(?P<idx>\d+)\.")], NAMES
    )
    assert [matches[NAMES[-1]] for matches in found] == ["29", "29"]


@given(st.text(r"mq_.^$\-", max_size=6), st.sampled_from(["m.q", "q_", "mq", "m_.q-"]), st.booleans())
def test_expressions_that_run_here_mean_what_the_re_module_means(source: str, name: str, is_full: bool) -> None:
    if not is_plain(source):
        return
    expected = re.fullmatch(source, name) if is_full else re.match(source, name)
    assert (name in match_patterns([Pattern(source, source, is_full)], [name])[0]) == (expected is not None)


@pytest.mark.parametrize("source", ["a+", "(a)", "[a]", "a*", "a?", "a{2}", "a|b", "(?i)a", r"\d", r"\1", "\n"])
def test_whatever_could_backtrack_goes_to_the_helper(source: str) -> None:
    assert not is_plain(source)


def test_a_broken_helper_is_not_blamed_on_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_confined", lambda *_: Outcome(b"", 1))
    with pytest.raises(PatternError, match="could not be evaluated"):
        match_patterns([full("a+")], NAMES)
