"""An answer's text becomes content and calls, whatever the form and however it was cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_engine.server.tool.delta import Parsed
from loraplex_engine.server.tool.format import FORMATS, ToolFormat, write_calls
from loraplex_engine.server.tool.reader import CallReader

NAMES = ("get_weather", "get_time", "f")
HERMES, LLAMA3, MISTRAL = FORMATS["hermes"], FORMATS["llama3_json"], FORMATS["mistral"]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
F1 = ("f", '{"a": 1}')
OSLO = ("get_weather", '{"city": "Oslo"}')

Answer = tuple[str, list[tuple[str, str]]]


def read(form: ToolFormat, pieces: Sequence[str]) -> Answer:
    """Return content and calls; the deltas must be well formed."""
    reader = CallReader(form, NAMES)
    parts = [*(reader.push(piece) for piece in pieces), reader.flush()]
    answer = collect(parts)
    assert reader.num_calls == len(answer[1])
    return answer


def collect(parts: Sequence[Parsed]) -> Answer:
    names: list[str] = []
    arguments: list[str] = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.name is not None:
            assert delta.index == len(names)
            assert re.fullmatch("call_[A-Za-z0-9]{24}", delta.id or "")
            names.append(delta.name)
            arguments.append("")
        else:
            assert delta.id is None
            assert delta.arguments
        assert delta.index == len(names) - 1
        arguments[delta.index] += delta.arguments
    return "".join(part.text for part in parts), list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, "plain", ("plain", [])),
        (HERMES, " a <tool b\n", (" a <tool b\n", [])),
        (HERMES, WEATHER, ("", [OSLO])),
        (HERMES, f"Let me see.\n\n{WEATHER}\n", ("Let me see.", [OSLO])),
        (HERMES, f"{WEATHER}\n{WEATHER}", ("", [OSLO, OSLO])),
        (HERMES, f"a {WEATHER}\nb", ("a\nb", [OSLO])),
        # one list in one block, as SmolLM2 writes it
        (
            HERMES,
            '<tool_call>[{"name":"f","arguments":{}}, {"name":"f"}]</tool_call>',
            ("", [("f", "{}"), ("f", "{}")]),
        ),
        # arguments first, as Hermes 2 writes them; null for none
        (HERMES, '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', ("", [("f", '{"a": [1]}')])),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
        # no closer, no brace at the end, something else instead of the closer
        (HERMES, WEATHER[:-12], ("", [OSLO])),
        (HERMES, WEATHER[:-5], ("", [OSLO])),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</oops>', ("</oops>", [("f", "{}")])),
        # what is no call of ours stays as it is
        (HERMES, UNKNOWN, (UNKNOWN, [])),
        (HERMES, " <tool_call> <tool_call>x", (" <tool_call> <tool_call>x", [])),
        (HERMES, f"<tool_call>{WEATHER}", ("<tool_call>", [OSLO])),
        (HERMES, '<tool_call>{"name": "f"', ('<tool_call>{"name": "f"', [])),
        # cut off, and broken off, within arguments
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', ("", [("f", '{"a": "x')])),
        (HERMES, '<tool_call>{"name": "f", "arguments": {\'a\': 1}}', ("'a': 1}}", [("f", "{")])),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
        (LLAMA3, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', ("", [("f", "{}")])),
        (LLAMA3, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', ("", [("f", "{}")] * 2)),
        (LLAMA3, 'so: {"name": "f", "parameters": {}}', ('so: {"name": "f", "parameters": {}}', [])),
        (LLAMA3, '{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', [])),
        (LLAMA3, "[1, 2]", ("[1, 2]", [])),
        (LLAMA3, '<|python_tag|>f.call(x="1")', ('<|python_tag|>f.call(x="1")', [])),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]', ("", [("f", "{}")])),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
        (
            MISTRAL,
            '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]x1[ARGS]{}',
            ("", [("f", '{"a": 1}'), ("f", "{}")]),
        ),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}', ("", [("f", '{"a": 1}')])),
        (MISTRAL, "[TOOL_CALLS] nothing", ("[TOOL_CALLS] nothing", [])),
    ],
)
def test_content_and_calls(form: ToolFormat, text: str, expected: Answer) -> None:
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected


ARGUMENTS = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text(max_size=8) | st.lists(st.booleans(), max_size=3), max_size=3
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), CALLS, st.data())
def test_what_a_form_writes_is_read_back_however_it_is_cut(
    name: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    written = [(call, json.dumps(arguments, ensure_ascii=False)) for call, arguments in calls]
    text = write_calls(written, FORMATS[name])
    assert read(FORMATS[name], cut(text, data)) == ("", written)


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "<|tool_call|>"]
BITS = ['{"name": "f"', ', "arguments": ', '"parameters": ', *'{}[],; \n"fx\\1', WEATHER, " " * 700]
NOISE = st.lists(st.sampled_from(MARKS + BITS), max_size=12).map("".join)


@given(st.sampled_from(sorted(FORMATS)), NOISE, st.data())
def test_no_text_is_read_otherwise_for_how_it_is_cut(name: str, text: str, data: st.DataObject) -> None:
    assert read(FORMATS[name], cut(text, data)) == read(FORMATS[name], [text])


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), NOISE)
def test_text_without_calls_is_content_unchanged(name: str, text: str) -> None:
    content, calls = read(FORMATS[name], [text])
    if not calls:
        assert content == text


@settings(deadline=None)
@given(CALLS, st.data())
def test_arguments_are_at_each_moment_the_beginning_of_json(
    calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    text = write_calls([(call, json.dumps(arguments)) for call, arguments in calls], HERMES)
    reader = CallReader(HERMES, NAMES)
    parts: list[Parsed] = []
    for piece in cut(text, data):
        parts.append(reader.push(piece))
        for (_, begun), (_, whole) in zip(collect(parts)[1], calls, strict=False):
            assert json.dumps(whole).startswith(begun)


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.push('<tool_call>\n{"name": "f", "arguments"').calls == ()
    assert [delta.arguments for delta in reader.push(': {"a').calls] == ['{"a']
    assert [delta.arguments for delta in reader.push('": 1').calls] == ['": 1']


def test_half_a_call_is_content_unless_it_must_be_a_call() -> None:
    text = 'a <tool_call>\n{"name": "ge'
    for reader, content in ((CallReader(HERMES, NAMES), text), (CallReader(HERMES, NAMES, is_certain=True), "a")):
        assert collect([reader.push(text), reader.flush()]) == (content, [])
    for text, content in (('{"name": "ge', ""), ('a <|python_tag|>{"na', 'a <|python_tag|>{"na')):
        reader = CallReader(LLAMA3, NAMES, is_certain=True)
        assert collect([reader.push(text), reader.flush()]) == (content, [])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_json_that_holds_an_opener_is_content_wherever_it_is_cut(name: str) -> None:
    form = FORMATS[name]
    for text in (f'"{form.opener}[{{ab {form.opener}f[ARGS]{{"', f'{{"a": " {form.opener} {form.opener}[{{x"}}', "[1,"):
        for end in range(len(text) + 1):
            reader = CallReader(form, NAMES, is_certain=True, has_answer=True)
            parts = [*(reader.push(char) for char in text[:end]), reader.flush()]
            assert collect(parts) == (text[:end], [])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_are_read_where_the_answer_might_have_been_json(name: str) -> None:
    calls = [F1, OSLO]
    reader = CallReader(FORMATS[name], NAMES, is_certain=True, has_answer=True)
    text = write_calls(calls, FORMATS[name])
    assert collect([*(reader.push(char) for char in text), reader.flush()]) == ("", calls)


@pytest.mark.parametrize(
    ("form", "text", "broken"),
    [
        (HERMES, "plain", False),
        (HERMES, WEATHER, False),
        # whole arguments are a whole call, whatever has become of the marks
        (HERMES, WEATHER[:-14], False),
        (HERMES, '<tool_call>{"name": "f"}', False),
        (HERMES, '<tool_call>{"name": "f"', False),
        (HERMES, WEATHER[:-15], True),
        (HERMES, '<tool_call>{"name": "f", "arguments": {\'a\': 1}}' + WEATHER, True),
        (HERMES, f'{WEATHER}<tool_call>{{"name": "f", "arguments": {{', True),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}', False),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1', True),
    ],
)
def test_a_call_is_broken_while_its_arguments_are(form: ToolFormat, text: str, broken: bool) -> None:
    reader = CallReader(form, NAMES)
    for char in text:
        reader.push(char)
    reader.flush()
    assert reader.has_broken_call is broken


def test_content_waits_no_longer_than_it_may_become_a_call() -> None:
    reader = CallReader(HERMES, NAMES)
    assert [reader.push(piece).text for piece in ("a <", "to", "o ", "b")] == ["a", "", " <too", " b"]


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
