"""Cases of section 5 about text, through every door: stop strings and characters, which `guided_choice` lets random
models say."""

from __future__ import annotations

from typing import Any

import pytest

from openai_answer import Answer
from openai_world import ALL_DOORS, SOME_DOORS, Door, OpenAIWorld

pytestmark = pytest.mark.pairs

FACE, TEARS, TURTLE = "\U0001fae0", "\U0001f979", "\u9f9c"
FAMILY, NAMASTE = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0928\u092e\u0938\u094d\u0924\u0947"
EMOJI = f"{FACE}{TEARS} {TURTLE}{FAMILY} {NAMASTE}{FACE}"
REPLACEMENT = "\ufffd"


def say(world: OpenAIWorld, door: Door, text: str, **fields: Any) -> Answer:
    """Have the model say a text, in tokens of its own choice."""
    answer = world.ask(door, **{"guided_choice": [text], "temperature": 1, "seed": 9, "max_tokens": 300, **fields})
    assert answer.status == 200, answer.error
    assert all("".join(choice.pieces) == choice.text for choice in answer.choices)
    return answer


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("DEFGHIJ", "ABC"),
        (["zzz", "DEFGHIJ"], "ABC"),
        (["EFGHIJ", "DE"], "ABC"),
        (["x", "GH", "y", "FGHI"], "ABCDEF"),
        ("FGHIJK", None),
        ("ABCDEFGHIJABCDEFGHIJ", None),
        ("A", ""),
        (["J"], "ABCDEFGHI"),
    ],
    ids=str,
)
def test_b087_b088_a_stop_string_ends_the_text_alike_everywhere(
    world: OpenAIWorld, door: Door, stop: str | list[str], expected: str | None
) -> None:
    answer = say(world, door, "ABCDEFGHIJ", stop=stop)
    assert (answer.text, answer.choices[0].finish_reason) == (
        "ABCDEFGHIJ" if expected is None else expected,
        "stop",
    )


def test_b088_stops_of_words_and_of_emoji(world: OpenAIWorld, door: Door) -> None:
    assert say(world, door, "one two three four", stop=["two three"]).text == "one "
    assert say(world, door, EMOJI, stop=[TURTLE + FAMILY]).text == f"{FACE}{TEARS} "
    # the beginning of a stop string that goes on otherwise is given out at the end
    assert say(world, door, FAMILY + "\U0001f468\u200d", stop=[FAMILY + FAMILY]).text == FAMILY + "\U0001f468\u200d"


def test_b090_b092_characters_are_whole_and_their_bytes_add_up(world: OpenAIWorld, door: Door) -> None:
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if door.endpoint == "chat" else {"logprobs": 2}
    answer = say(world, door, EMOJI, **wanted)
    assert answer.text == EMOJI
    assert all(REPLACEMENT not in piece for piece in answer.choices[0].pieces)
    entries = answer.choices[0].logprobs
    assert answer.usage is not None
    # each token has a part in the text but for the end, if it was a token
    assert answer.usage["completion_tokens"] - len(entries) in (0, 1)
    if door.endpoint == "chat":
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == EMOJI
        return
    offsets = [offset for *_, offset in entries]
    assert offsets == sorted(offsets)
    assert offsets[-1] < len(EMOJI) + (world.body(door)["prompt"] == "")


@pytest.mark.parametrize("door", SOME_DOORS, ids=str)
def test_b091_an_answer_cut_in_a_character_ends_with_one_replacement(world: OpenAIWorld, door: Door) -> None:
    seen = set()
    for max_tokens in range(1, 13):
        wanted: dict[str, Any] = {"logprobs": True} if door.endpoint == "chat" else {}
        answer = say(world, door, FACE * 8, max_tokens=max_tokens, **wanted)
        kept = answer.text.removesuffix(REPLACEMENT)
        assert kept == FACE * len(kept)
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == max_tokens
        assert answer.choices[0].finish_reason == "length"
        seen.add(answer.text == kept)
        if door.endpoint == "chat":
            data = b"".join(bytes(entry["bytes"]) for entry in answer.choices[0].logprobs)
            assert data.decode(errors="ignore") == kept
            assert (data.decode(errors="ignore").encode() == data) == (answer.text == kept)
    assert False in seen, "no answer was cut within a character"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_b090_every_door_of_a_route_says_the_same(world: OpenAIWorld, endpoint: str) -> None:
    for has_adapter in (False, True):
        doors = [door for door in ALL_DOORS if (door.endpoint, door.has_adapter) == (endpoint, has_adapter)]
        found = [say(world, door, EMOJI, n=2) for door in doors]
        first = [(choice.text, choice.finish_reason) for choice in found[0].choices]
        assert all([(choice.text, choice.finish_reason) for choice in other.choices] == first for other in found)
        assert len({str(other.usage and other.usage["completion_tokens"]) for other in found}) == 1
