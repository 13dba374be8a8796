"""Answers that must match a grammar, on a random model: valid, the same whichever way the engine takes, harmless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest

from engines import SEVEN, EngineWorld, text_ids
from loraplex_engine.bases.pull import pull
from loraplex_engine.errors import GrammarError
from loraplex_engine.sampling import sampler
from loraplex_engine.token_table import build_token_table
from loraplex_engine.wire.messages import TokenEvent
from support import build_tokenizer, write_adapter

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "bird"]},
        "name": {"type": "string", "maxLength": 6},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "name", "legs"],
    "additionalProperties": False,
}
JSON = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
WORDS = llguidance.LLMatcher.grammar_from_regex("(yes|no|maybe)( [a-z]{2,5}){2}[!?]")
GRAMMARS: list[dict[str, Any]] = [
    {"grammar": JSON},
    {"grammar": JSON, "temperature": 1.2, "seed": 4, "logprobs": 1},
    {"grammar": WORDS, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 5},
    {},
    {"grammar": WORDS, "min_tokens": 20, "logit_bias": ((9, -100.0),), "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 6},
]
TABLE = build_token_table(json.loads(build_tokenizer().to_str()))


class Case:
    def __init__(self, base: Path, tmp: Path) -> None:
        self.base, self.tmp = base, tmp
        self.folders = [write_adapter(tmp / f"a{i}", base, rank=8, targets=SEVEN, seed=i) for i in range(2)]

    def open(self, **settings: Any) -> EngineWorld:
        return EngineWorld(self.base, self.tmp / "cache", **settings)

    def answers(self, **settings: Any) -> tuple[EngineWorld, list[list[TokenEvent]]]:
        world = self.open(**settings)
        digests = [None, *map(world.put, self.folders)]
        requests = [
            world.request([5 + i, 30, 40 + i, 50] * 6, digests[i % 3], 80, **GRAMMARS[i % 6]) for i in range(12)
        ]
        events = world.run(requests)
        return world, [events[request.request_id] for request in requests]


@pytest.fixture(scope="module")
def case(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tmp = tmp_path_factory.mktemp("grammars")
    return Case(pull(str(tiny_llama), tmp / "bases"), tmp)


@pytest.fixture(scope="module")
def expected(case: Case) -> list[list[int]]:
    return [text_ids(events) for events in case.answers(max_num_seqs=1)[1]]


def text_of(token_ids: list[int]) -> str:
    return b"".join(map(TABLE.get, token_ids)).decode()


def test_answers_match_their_grammars_and_end_by_themselves(case: Case) -> None:
    world, answers = case.answers()
    for i, events in enumerate(answers):
        grammar = GRAMMARS[i % 6].get("grammar")
        text = text_of(text_ids(events)) if grammar else ""
        if grammar is JSON:
            assert set(json.loads(text)) == {"kind", "name", "legs"}
        elif grammar is WORDS:
            assert text.split(" ")[0] in ("yes", "no", "maybe")
            assert text[-1] in "!?"
        assert events[-1].finish == ("stop" if grammar else "length")
    assert all(len(event.logprobs) == len(event.token_ids) for event in answers[1])
    assert world.engine.pool.num_free == world.engine.pool.num_blocks


def test_company_chunks_and_preemption_change_no_answer(case: Case, expected: list[list[int]]) -> None:
    # 14 blocks of 16 tokens
    few_blocks = {"kv_cache_memory_bytes": 14 * 2 * 2 * 16 * 2 * 20 * 4}
    for settings in ({"max_num_batched_tokens": 16}, {"max_num_seqs": 3}, few_blocks):
        world, answers = case.answers(**settings)
        assert [text_ids(events) for events in answers] == expected
    assert world.engine.scheduler.num_preemptions > 0


def test_steps_that_never_wait_for_a_mask_change_no_answer(
    case: Case, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_MAX_WAIT_S", 0.0)
    assert [text_ids(events) for events in case.answers()[1]] == expected


def test_grammar_that_fails_ends_its_request_and_no_other(case: Case) -> None:
    world = case.open()
    bad = world.request([5, 6, 7], None, 40, grammar="start: [", temperature=1.0)
    hostile = world.request([5, 6, 7], None, 400, grammar="start: s\ns: s s s | s s | /./", temperature=1.0)
    good = world.request([5, 6, 7], None, 80, grammar=JSON, temperature=1.0)
    events = world.run([bad, hostile, good])
    for request in (bad, hostile):
        error = events[request.request_id][-1].error
        assert error is not None
        assert error.code == "invalid_grammar"
    assert json.loads(text_of(text_ids(events[good.request_id])))


def test_engine_without_a_readable_tokenizer_refuses_grammars_and_serves_all_else(case: Case, tmp_path: Path) -> None:
    world = case.open()
    world.engine._guides = None
    with pytest.raises(GrammarError):
        world.engine.add(world.request([5], None, 4, grammar=JSON))
    assert world.run([world.request([5], None, 4)])
    world.engine.check_integrity()
