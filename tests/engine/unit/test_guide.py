from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event, get_ident

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from loraplex_engine.core.guide import GuideState
from loraplex_engine.errors import GrammarError, StepFailedError
from loraplex_engine.guide.grammar_guide import Endings, GrammarGuide, Sizes
from loraplex_engine.guide.guides import Guides
from loraplex_engine.guide.rounds import MAX_ROWS, Outcome, Rounds
from loraplex_engine.guide.vocabulary import build_vocabulary, read_vocabulary
from loraplex_engine.token_table import TokenTable, build_token_table
from loraplex_engine.wire.messages import SamplingParams
from toy_tokenizers import byte_level, sentencepiece

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
JSON = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
AMBIGUOUS = "start: s\ns: s s s | s s | /./"


class World:
    """Guides of one toy tokenizer."""

    def __init__(self, backend: Tokenizer, *, extra: int = 0, eos: tuple[str, ...] = ()) -> None:
        self.backend = backend
        self.size = backend.get_vocab_size() + extra
        self.eos = tuple(backend.token_to_id(token) for token in eos)
        self.table: TokenTable = build_token_table(json.loads(backend.to_str()))
        self.vocabulary = build_vocabulary(backend.to_str(), self.size, self.eos)
        self.guides = Guides(self.vocabulary, self.size, self.eos)

    def open(self, grammar: str, **params) -> GrammarGuide:
        guide = self.guides.open(SamplingParams(1000, grammar=grammar, **params))
        guide.begin()
        assert guide.wait(10)
        return guide

    def allowed(self, guide: GrammarGuide) -> list[int]:
        assert guide.state is GuideState.READY, guide.error
        bits = np.unpackbits(guide.allowed.view(np.uint8), bitorder="little")
        assert not bits[self.size :].any()
        return np.flatnonzero(bits).tolist()

    def advance(self, guide: GrammarGuide, token_id: int) -> None:
        guide.advance(token_id)
        assert guide.wait(10)

    def write(self, guide: GrammarGuide, seed: int, limit: int = 500) -> str:
        """Random allowed tokens until the guide has ended."""
        rng, text = random.Random(seed), b""
        for _ in range(limit):
            if guide.state is GuideState.ENDED:
                return text.decode()
            token_id = rng.choice(self.allowed(guide))
            text += self.table.get(token_id)
            if token_id in self.eos:
                return text.decode()
            self.advance(guide, token_id)
        raise AssertionError(text)


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece", "more of the model"])
def world(request) -> World:
    if request.param == "sentencepiece":
        return World(sentencepiece(), eos=("</s>",))
    return World(byte_level(), extra=37 if request.param == "more of the model" else 0, eos=("<|im_end|>",))


@pytest.mark.parametrize("seed", range(6))
def test_what_a_random_model_writes_under_a_schema_is_valid_and_ends_by_itself(world, seed):
    value = json.loads(world.write(world.open(JSON), seed))
    assert set(value) == {"name", "sizes"}
    assert len(value["name"]) <= 12
    assert all(isinstance(size, int) for size in value["sizes"])


def test_forced_text_is_written_as_the_tokenizer_writes_it(world):
    text = "the café and the model"
    guide, ids = world.open(llguidance.LLMatcher.grammar_from_regex(text)), []
    while guide.state is not GuideState.ENDED:
        ids.append(world.allowed(guide)[0])
        world.advance(guide, ids[-1])
    lead = world.backend.encode("\n", add_special_tokens=False).ids if world.table.has_leading_space else []
    encoded = world.backend.encode("\n" * bool(lead) + text, add_special_tokens=False).ids
    assert ids == encoded[len(lead) :]


# the last one is no text that a tokenizer with a normalizer keeps
@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "x</s><s>", "<unk>", "cafe\u0301"])
@pytest.mark.parametrize("kind", ["regex", "lark", "const"])
def test_text_that_names_a_special_token_is_written_as_text(world, text, kind):
    quoted = json.dumps(text, ensure_ascii=False)
    grammars = {
        "regex": lambda: llguidance.LLMatcher.grammar_from_regex(text.replace("|", r"\|")),
        "lark": lambda: llguidance.LLMatcher.grammar_from_lark(f"start: {quoted}"),
        "const": lambda: llguidance.LLMatcher.grammar_from_json_schema({"const": text}),
    }
    guide = world.open(grammars[kind]())
    assert world.write(guide, 0) == (quoted if kind == "const" else text)


def test_special_token_that_a_grammar_names_by_id_is_that_token(world):
    (eos,) = world.eos
    name = next(name for name, token_id in world.table.special_ids.items() if token_id == eos)
    guide = world.open(f'start: <[{eos}]> "{name}"')
    assert world.allowed(guide) == [eos]
    world.advance(guide, eos)
    assert world.write(guide, 0) == name


def test_an_answer_may_end_only_where_the_grammar_allows_it(world):
    guide = world.open(llguidance.LLMatcher.grammar_from_regex("[ab]{2,4}"))
    (eos,) = world.eos
    for position in range(4):
        assert (eos in world.allowed(guide)) is (position >= 2)
        world.advance(guide, world.backend.token_to_id("a"))
    assert guide.state is GuideState.ENDED


def test_request_that_ignores_eos_goes_on_while_something_else_is_allowed(world):
    (eos,), a = world.eos, world.backend.token_to_id("a")
    guide = world.open(llguidance.LLMatcher.grammar_from_regex("[ab]{0,3}"), ignore_eos=True)
    for _ in range(3):
        assert eos not in world.allowed(guide)
        world.advance(guide, a)
    assert guide.state is GuideState.ENDED
    # nothing but the end is left
    assert world.allowed(world.open(llguidance.LLMatcher.grammar_from_regex(""), ignore_eos=True)) == [eos]


def test_before_min_tokens_neither_eos_nor_stop_tokens_come_unless_alone(world):
    (eos,), (a, b) = world.eos, (world.backend.token_to_id(letter) for letter in "ab")
    params = {"min_tokens": 2, "stop_token_ids": (b,)}
    guide = world.open(llguidance.LLMatcher.grammar_from_regex("[ab]*"), **params)
    for position in range(3):
        allowed = world.allowed(guide)
        assert a in allowed
        assert {eos, b} & set(allowed) == ({eos, b} if position >= 2 else set())
        world.advance(guide, a)
    assert world.allowed(world.open(llguidance.LLMatcher.grammar_from_regex("b"), **params)) == [b]


def test_tokens_that_the_model_lacks_are_never_allowed():
    backend = byte_level()
    whole = World(backend, eos=("<|im_end|>",))
    small = World(backend, eos=("<|im_end|>",))
    for size in (400, 401, 415):
        small.size = size
        small.guides = Guides(small.vocabulary, size, small.eos)
        guide, full = (w.open(llguidance.LLMatcher.grammar_from_regex("[a-z ]+")) for w in (small, whole))
        assert len(guide.allowed) == (size + 31) // 32
        assert small.allowed(guide) == [token_id for token_id in whole.allowed(full) if token_id < size]
    small.guides = Guides(small.vocabulary, 33, small.eos)
    guide = small.open(llguidance.LLMatcher.grammar_from_regex("~"))
    assert guide.state is GuideState.FAILED
    assert "does not have" in str(guide.error)


def test_added_tokens_are_text_unless_the_vocabulary_says_that_they_are_special():
    backend = Tokenizer.from_str(byte_level().to_str())
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    backend.add_special_tokens(["<mark>"])
    world = World(backend, eos=("<|im_end|>",))
    plain, special = backend.token_to_id("<tool_call>"), backend.token_to_id("<mark>")
    text = world.allowed(world.open('start: "<tool_call>" | "<mark>" | "x"'))
    assert plain in text
    assert special not in text
    assert world.allowed(world.open(f"start: <[{special}]>")) == [special]


def test_grammar_that_cannot_be_built_fails_its_guide(world):
    for grammar in ("start: [", "{", json.dumps({"grammars": [{"json_schema": {"type": "banana"}}]})):
        guide = world.open(grammar)
        assert guide.state is GuideState.FAILED
        assert isinstance(guide.error, GrammarError)


def test_grammar_that_is_too_ambiguous_fails_in_time_and_tells_nothing_of_the_text(world):
    guide, rng = world.open(AMBIGUOUS), random.Random(0)
    started_at = time.monotonic()
    while guide.state is GuideState.READY:
        world.advance(guide, rng.choice(world.allowed(guide)))
        assert time.monotonic() - started_at < 60
    assert guide.state is GuideState.FAILED
    assert "Too many items" in str(guide.error)
    assert "⟦" not in str(guide.error)


def test_grammar_that_takes_too_much_of_the_processor_fails(world, monkeypatch):
    times = iter([0.0, 0.49, 1.0, 1.011, 2.0, 2.002])
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    guide = world.open(llguidance.LLMatcher.grammar_from_regex("[ab]*"))
    world.advance(guide, world.allowed(guide)[-1])
    # 0.501 s after one token, 0.503 s after two
    assert guide.state is GuideState.READY
    world.advance(guide, world.allowed(guide)[-1])
    assert guide.state is GuideState.READY
    times = iter([3.0, 3.01])
    world.advance(guide, world.allowed(guide)[-1])
    assert guide.state is GuideState.FAILED
    assert "too much time" in str(guide.error)


@contextmanager
def one_round(rounds: Rounds) -> Iterator[None]:
    """Holds the threads until all of the block have joined."""
    gate = Event()
    hold(rounds, gate)
    yield
    gate.set()


def hold(rounds: Rounds, gate: Event) -> None:
    for _ in range(rounds._threads._max_workers):
        rounds._threads.submit(gate.wait, 10)


@pytest.mark.parametrize("num_cores", [1, 8])
def test_many_rows_work_in_rounds_each_once(monkeypatch, num_cores):
    monkeypatch.setattr("loraplex_engine.guide.rounds.os.cpu_count", lambda: num_cores)
    rounds, told = Rounds(), []

    class Noted:
        def __init__(self, name: int) -> None:
            self.name = name

        def follow(self) -> Outcome:
            told.append((self.name, get_ident()))
            return Outcome(GuideState.READY)

    for num_rows in (1, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS):
        told.clear()
        with one_round(rounds):
            joined = [rounds.join(Noted(row)) for row in range(num_rows)]
        assert all(future.result(10).state is GuideState.READY for future in joined)
        assert sorted(name for name, _ in told) == list(range(num_rows))
        for first in range(0, num_rows, MAX_ROWS):
            assert len({thread for name, thread in told if first <= name < first + MAX_ROWS}) == 1
    assert rounds._waiting == []


def test_rows_of_one_round_find_what_each_finds_alone(world):
    grammars = [JSON, llguidance.LLMatcher.grammar_from_regex("[a-c]{2,9}"), JSON, AMBIGUOUS]
    together = [world.open(grammar, min_tokens=row) for row, grammar in enumerate(grammars)]
    alone = [world.open(grammar, min_tokens=row) for row, grammar in enumerate(grammars)]
    rng, seen = random.Random(1), set()
    for _ in range(12):
        chosen = [rng.choice(world.allowed(guide)) if guide.state is GuideState.READY else None for guide in together]
        with one_round(world.guides._rounds):
            for guide, token_id in zip(together, chosen, strict=True):
                guide._is_slow = False
                if token_id is not None:
                    guide.advance(token_id)
        for left, right, token_id in zip(together, alone, chosen, strict=True):
            if token_id is not None:
                world.advance(right, token_id)
            assert left.wait(10)
            assert (left.state, str(left.error)) == (right.state, str(right.error))
            if left.state is GuideState.READY:
                np.testing.assert_array_equal(left.allowed, right.allowed)
            seen.add(left.state)
    assert GuideState.READY in seen
    assert len(seen) > 1


def test_row_that_is_slow_works_alone_until_it_is_fast_again(world, monkeypatch):
    guides = [world.open(JSON), world.open(JSON)]
    monkeypatch.setattr("loraplex_engine.guide.grammar_guide._SLOW_S", -1.0)
    with one_round(world.guides._rounds):
        for guide in guides:
            guide.advance(world.allowed(guide)[0])
    assert all(guide.wait(10) and guide._is_slow for guide in guides)
    held = Event()
    hold(world.guides._rounds, held)
    # nobody waits for the rounds' threads
    world.advance(guides[0], world.allowed(guides[0])[0])
    monkeypatch.setattr("loraplex_engine.guide.grammar_guide._SLOW_S", 10.0)
    world.advance(guides[1], world.allowed(guides[1])[0])
    held.set()
    assert [guide._is_slow for guide in guides] == [True, False]


def test_row_that_is_closed_before_its_round_is_left_out(world):
    first, second = world.open(JSON), world.open(JSON)
    with one_round(world.guides._rounds):
        for guide in (first, second):
            guide.advance(world.allowed(guide)[0])
        first.close()
    assert second.wait(10)
    assert (first.state, second.state) == (GuideState.FAILED, GuideState.READY)


def test_fault_in_a_round_fails_its_row_alone(world, monkeypatch, caplog):
    first, second = world.open(JSON), world.open(JSON)
    monkeypatch.setattr(first, "_matcher", None)
    with one_round(world.guides._rounds):
        for guide in (first, second):
            guide.advance(world.allowed(guide)[0])
    assert first.wait(10)
    assert second.wait(10)
    assert (first.state, second.state) == (GuideState.FAILED, GuideState.READY)
    assert "could not be followed" in caplog.text


def test_choices_of_one_grammar_share_its_build_and_not_their_places(world):
    first, second = world.open(JSON), world.open(JSON)
    start = world.allowed(second)
    world.advance(first, world.allowed(first)[0])
    assert world.allowed(second) == start
    third = world.open(JSON)
    assert world.allowed(third) == start


def test_base_whose_tokenizer_cannot_be_read_has_no_structured_output(tmp_path, caplog):
    assert read_vocabulary(tmp_path, 100, (1,)) is None
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}}')
    vocabulary = read_vocabulary(tmp_path, 100, (1,))
    assert vocabulary is None
    assert caplog.text.count("no structured output") == 2
    with pytest.raises(GrammarError, match="allows for no structured output"):
        Guides(vocabulary, 100, (1,)).open(SamplingParams(1, grammar=JSON))


def test_base_without_an_end_token_ends_when_nothing_may_follow():
    world = World(byte_level())
    assert json.loads(world.write(world.open(JSON), 3))


class Held:
    """Submits nothing: a thread that never gets to it."""

    def __init__(self, build=lambda: None) -> None:
        self.now = 0.0
        self.work: list = []
        self.futures: list[Future] = []
        endings = Endings((), (), 0, ignores_eos=False)
        self.guide = GrammarGuide(build, endings, Sizes(10, 10), self.submit, Rounds(), lambda: self.now)

    def submit(self, work):
        self.work.append(work)
        self.futures.append(Future())
        return self.futures[-1]


def test_guide_whose_work_takes_for_ever_fails():
    held = Held()
    assert held.guide.state is GuideState.PENDING
    held.guide.begin()
    held.guide.begin()
    assert len(held.work) == 1
    assert not held.guide.wait(0.001)
    held.now = 9.0
    assert held.guide.state is GuideState.PENDING
    held.now = 11.0
    assert held.guide.state is GuideState.FAILED
    assert "too long" in str(held.guide.error)


def test_guide_that_is_closed_leaves_its_work_undone():
    held = Held()
    held.guide.close()
    held.guide.begin()
    held.guide.close()
    assert held.futures[0].cancelled()
    assert held.guide.state is GuideState.FAILED


def test_fault_of_ours_fails_the_guide_and_is_logged(caplog):
    def build():
        raise RuntimeError("broken")

    held = Held(build)
    held.guide.begin()
    held.futures[0].set_result(held.work[0]())
    assert held.guide.state is GuideState.FAILED
    assert isinstance(held.guide.error, StepFailedError)
    assert "broken" in caplog.text
