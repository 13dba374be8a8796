"""Prompts equal those of transformers for the styles of template that models bring, and what templates differ in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chats import Reader, read_ids, reference_ids
from loraplex_engine.errors import BaseUnsupportedError, InvalidRequestError, UnsupportedParameterError
from template_texts import NEEDS_PARTS, STYLES, TAKES_TEXT
from toy_tokenizers import write_byte_level

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city <|im_end|>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "é", "parameters": {"type": "object", "properties": {}}},
    },
]


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ROUND_TRIP: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Ulm and Bonn?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            call("abcdefgh1", "get_weather", '{"city": "Ulm \U0001fae0"}'),
            call("abcdefgh2", "get_weather", '{"city": "Bonn", "days": [1, 2.5, null, {"x": true}]}'),
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "12 degrees"},
    {"role": "tool", "tool_call_id": "abcdefgh2", "content": '{"t": 14}'},
    {"role": "assistant", "content": "12 and 14 degrees."},
    {"role": "user", "content": "And the time?"},
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "  Hi\n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <think>no</think> c"},
        {"role": "user", "content": "龜 \U0001f468\u200d\U0001f469\u200d\U0001f467 नमस्ते"},
    ],
    "empty": [{"role": "user", "content": ""}],
    "tools": ROUND_TRIP,
    "calling": ROUND_TRIP[:3],
    "answered": ROUND_TRIP[:5],
}


def knows_tools(style: str) -> bool:
    return "tools" in STYLES[style]


def shape(chat: str, style: str) -> list[dict[str, Any]]:
    """Return a chat as this style needs it in transformers."""
    if style not in NEEDS_PARTS:
        return CHATS[chat]
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in CHATS[chat]]


def cases() -> list[tuple[str, str]]:
    with_tools = {"tools", "calling", "answered"}
    return [(style, chat) for style in STYLES for chat in CHATS if chat not in with_tools or knows_tools(style)]


@pytest.mark.parametrize(("style", "chat"), cases())
async def test_prompts_equal_those_of_transformers(tmp_path: Path, style: str, chat: str) -> None:
    folder = write_byte_level(tmp_path, STYLES[style])
    tools = [TOOLS, None] if knows_tools(style) else [None]
    async with Reader(folder) as reader:
        for offered in tools:
            for prompt in (True, False):
                options: dict[str, Any] = {"add_generation_prompt": prompt} | ({"tools": offered} if offered else {})
                try:
                    expected = reference_ids(
                        folder,
                        shape(chat, style),
                        takes_text=style in TAKES_TEXT,
                        sanitize_control_tokens=True,
                        **options,
                    )
                # a template's own refusal
                except Exception:
                    with pytest.raises(InvalidRequestError):
                        await reader.ids(CHATS[chat], **options)
                    continue
                assert await reader.ids(CHATS[chat], **options) == expected


@pytest.mark.parametrize("style", [style for style in STYLES if style not in NEEDS_PARTS])
async def test_the_last_message_goes_on_as_in_transformers(tmp_path: Path, style: str) -> None:
    folder = write_byte_level(tmp_path, STYLES[style])
    chat = [*CHATS["one"], {"role": "assistant", "content": "Well, "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert await read_ids(folder, chat, **options) == reference_ids(folder, chat, **options)
    with pytest.raises(InvalidRequestError) as refusal:
        await read_ids(folder, chat, continue_final_message=True, add_generation_prompt=True)
    assert refusal.value.param == "continue_final_message"


async def test_arguments_are_text_for_templates_that_want_text(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, STYLES["deepseek"])
    text = '{"city":  "Ulm"}'
    messages = [*CHATS["one"], {"role": "assistant", "content": None, "tool_calls": [call("1", "f", text)]}]
    async with Reader(folder) as reader:
        ids = await reader.ids(messages)
        assert text in reader.tokenizer._tokenizer.decode(ids, skip_special_tokens=False)


async def test_ids_that_a_template_refuses_are_replaced_alike_in_calls_and_answers(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, STYLES["mistral"])
    long_ids = json.loads(json.dumps(ROUND_TRIP).replace("abcdefgh", "call_0123456789abcdef"))
    async with Reader(folder) as reader:
        text = reader.tokenizer._tokenizer.decode(await reader.ids(long_ids, tools=TOOLS), skip_special_tokens=False)
    assert "call_0" not in text
    assert '"arguments": {"city"' in text
    ids = [part[:9] for part in text.replace('"call_id": "', '"id": "').split('"id": "')[1:]]
    assert len(ids) == 4
    assert len(set(ids)) == 2


@pytest.mark.parametrize("style", STYLES)
async def test_empty_and_null_calls_mean_none(tmp_path: Path, style: str) -> None:
    folder = write_byte_level(tmp_path, STYLES[style])
    async with Reader(folder) as reader:
        plain, *others = [
            await reader.ids([*CHATS["one"], {"role": "assistant", "content": "x"} | more, *CHATS["one"]])
            for more in ({}, {"tool_calls": []}, {"tool_calls": None}, {"name": None, "refusal": None, "audio": None})
        ]
    assert others == [plain] * 3


async def test_a_null_content_is_told_to_templates_that_ask_for_it(tmp_path: Path) -> None:
    asks = "{% for m in messages %}[{{ 'null' if m.content is none else m.content }}]{% endfor %}"
    prints = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    messages = [*CHATS["one"], {"role": "assistant", "content": None, "tool_calls": [call("1", "f", "{}")]}]
    for source, text in ((asks, "[Hi][null]"), (prints, "[Hi][]")):
        folder = write_byte_level(tmp_path / text[-5:-1], source)
        async with Reader(folder) as reader:
            assert reader.tokenizer._tokenizer.decode(await reader.ids(messages)) == text


async def test_parts_stay_parts_only_where_the_template_goes_through_them(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    joins = write_byte_level(tmp_path / "joins", STYLES["chatml"])
    assert await read_ids(joins, parts) == reference_ids(joins, [{"role": "user", "content": "a\nb"}])
    for style in ("llama3-vision", "only-parts"):
        keeps = write_byte_level(tmp_path / style, STYLES[style])
        assert await read_ids(keeps, parts) == reference_ids(keeps, parts)
    text = [{"role": "user", "content": "a"}]
    part = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert await read_ids(keeps, text) == reference_ids(keeps, part)


async def test_developers_are_the_system_unless_the_template_knows_them(tmp_path: Path) -> None:
    developer = [{"role": "developer", "content": "x"}, *CHATS["one"]]
    system = [{"role": "system", "content": "x"}, *CHATS["one"]]
    unknown = write_byte_level(tmp_path / "unknown", STYLES["chatml"])
    assert await read_ids(unknown, developer) == reference_ids(unknown, system)
    known = write_byte_level(tmp_path / "known", STYLES["chatml"] + "{# #}{{ 'developer' if false }}")
    assert await read_ids(known, developer) == reference_ids(known, developer)


async def test_names_are_refused_unless_the_template_reads_the_messages_name(tmp_path: Path) -> None:
    named = [{"role": "user", "content": "Hi", "name": "ann"}]
    # it reads the names of tools, which are not those of messages
    folder = write_byte_level(tmp_path / "qwen", STYLES["qwen"])
    with pytest.raises(UnsupportedParameterError) as refusal:
        await read_ids(folder, named)
    assert refusal.value.param == "messages"
    for index, read in enumerate(("m.name", "m['name']", "m.get('name')", "messages[0].name")):
        source = "{% for m in messages %}{{ " + read + " }}{{ m.content }}{% endfor %}"
        folder = write_byte_level(tmp_path / str(index), source)
        assert await read_ids(folder, named) == reference_ids(folder, named)


async def test_a_tool_has_the_name_that_was_called_where_the_template_reads_names(tmp_path: Path) -> None:
    source = "{% for m in messages %}<{{ m.name }}>{{ m.content }}{% endfor %}"
    answered = ROUND_TRIP[1:4]
    async with Reader(write_byte_level(tmp_path / "reads", source)) as reader:
        assert "<get_weather>12 degrees" in reader.tokenizer._tokenizer.decode(await reader.ids(answered))
    same = [*answered[:2], answered[2] | {"name": "get_weather"}]
    other = [*answered[:2], answered[2] | {"name": "now"}]
    async with Reader(write_byte_level(tmp_path / "blind", STYLES["chatml"])) as reader:
        assert await reader.ids(same) == await reader.ids(answered)
        with pytest.raises(UnsupportedParameterError):
            await reader.ids(other)


@pytest.mark.parametrize("value", [True, False, 5, "x", ["a"], {"a": 1}])
async def test_options_reach_the_template_and_others_are_refused(tmp_path: Path, value: Any) -> None:
    source = "{% if enable_thinking is defined %}{{ enable_thinking | tojson }}{% endif %}{{ bos_token }}!"
    folder = write_byte_level(tmp_path, source)
    async with Reader(folder) as reader:
        ids = await reader.ids(CHATS["one"], chat_template_kwargs={"enable_thinking": value})
        assert ids == reference_ids(folder, CHATS["one"], enable_thinking=value)
        for name in (
            "thinking",
            "messages",
            "tools",
            "bos_token",
            "raise_exception",
            "add_generation_prompt",
            "",
            "x" * 999,
        ):
            with pytest.raises(UnsupportedParameterError) as refusal:
                await reader.ids(CHATS["one"], chat_template_kwargs={name: value})
            assert refusal.value.param == "chat_template_kwargs"
            assert len(str(refusal.value)) < 300


async def test_control_tokens_are_plain_text_wherever_a_client_writes_them(tmp_path: Path) -> None:
    source = (
        "{{ messages | tojson }}{{ tools | tojson(ensure_ascii=true) }}{{ hint }}{{ '<|im_start|>' }}"
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
        "{% endfor %}"
    )
    text = "<|im_end|>"
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "tool_calls": [call(text, text, json.dumps({text: [text]}))], "content": None},
        {"role": "tool", "tool_call_id": text, "content": text},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {text: text}}}
    escaped = '{"a": "\\u003c|im_end|>"}'
    messages.append({"role": "assistant", "content": "", "tool_calls": [call("2", "f", escaped)]})
    async with Reader(write_byte_level(tmp_path, source)) as reader:
        ids = await reader.ids(messages, tools=[tool], chat_template_kwargs={"hint": text})
        start, end = (reader.tokenizer._tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
        decoded = reader.tokenizer._tokenizer.decode(ids, skip_special_tokens=False)
    assert (ids.count(start), ids.count(end)) == (1, 0)
    assert decoded.count(text) >= 10
    assert not re.search(r"\\u?db|\\U000f", decoded)


async def test_a_thought_is_left_out_though_its_end_is_a_control_token(tmp_path: Path) -> None:
    """The mark behind `</tool>` would keep the line breaks that the template strips."""
    source = (
        "{% for m in messages %}{% set content = m.content %}{% if '<tool>' in content %}"
        "{% set content = content.split('<tool>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + content + '<|im_end|>' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "thought<tool>\n\nword"}]
    short = [messages[0], {"role": "assistant", "content": "word"}]
    folder = write_byte_level(tmp_path, source)
    async with Reader(folder) as reader:
        assert await reader.ids(messages) == await reader.ids(short)


async def test_a_base_may_have_a_template_for_tools(tmp_path: Path) -> None:
    plain, for_tools = "{{ 'plain' }}", "{% if tools %}{{ 'tools' }}{% endif %}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": for_tools}]
    in_config = write_byte_level(tmp_path / "config", None, chat_template=named)
    in_files = write_byte_level(tmp_path / "files", plain)
    (in_files / "additional_chat_templates").mkdir()
    (in_files / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    for folder in (in_config, in_files):
        assert await read_ids(folder, CHATS["one"]) == reference_ids(folder, CHATS["one"])
        assert await read_ids(folder, CHATS["one"], tools=TOOLS) == reference_ids(folder, CHATS["one"], tools=TOOLS)


@pytest.mark.parametrize("template", [5, {"default": "x"}, [{"name": "other", "template": "x"}], [{}], "{% for %}"])
async def test_a_base_whose_template_is_none_does_not_start(tmp_path: Path, template: Any) -> None:
    with pytest.raises(BaseUnsupportedError, match="chat template"):
        await read_ids(write_byte_level(tmp_path, None, chat_template=template), CHATS["one"])


async def test_a_large_chat_is_rendered_in_the_sandbox_with_the_same_result(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, STYLES["chatml"])
    messages = [{"role": "user", "content": "a b"} for _ in range(500)]
    async with Reader(folder) as reader:
        ids = await reader.ids(messages)
        assert reader.sandbox.num_starts == 1
    assert ids == reference_ids(folder, messages)
