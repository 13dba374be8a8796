from __future__ import annotations

from typing import Any

import pytest

from loraplex_engine.errors import InvalidRequestError, UnknownParameterError, UnsupportedParameterError
from loraplex_engine.server.field.request import read_chat, read_completion, read_tokenize

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BOTH = [(read_chat, CHAT), (read_completion, PROMPT)]

WRONG = [
    *[("max_tokens", value) for value in (0, -1, 1.5, "5", True, [])],
    *[("temperature", value) for value in (-1, 2.1, "1", True, {})],
    *[("top_p", value) for value in (0, 1.1, -0.1, "x")],
    *[("top_k", value) for value in (-2, 1.5, "x")],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("n", value) for value in (0, 17, 1.0, "2", False)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "7")],
    *[("stop", value) for value in ("", [""], ["x"] * 17, "y" * 129, 5, [1], {"a": 1})],
    *[("stop_token_ids", value) for value in (5, ["a"], [1.5], list(range(65)))],
    *[("min_tokens", value) for value in (-1, "1")],
    *[("ignore_eos", value) for value in (1, "true")],
    *[("stream", value) for value in (1, "true")],
    *[("stream_options", value) for value in (True, {"x": 1}, {"include_usage": 1}, {"include_usage": True})],
    *[("user", value) for value in (5, [])],
    *[("metadata", value) for value in ({"a": 1}, {str(i): "" for i in range(17)}, {"a": "x" * 513}, [], "x")],
    *[("cache_salt", value) for value in (5, [], "x" * 257)],
    *[("prompt_logprobs", value) for value in (-1, 21, 1.5, "1", True)],
    *[("model", value) for value in ("", None, 5, [])],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, "x", False, [])],
    *[("repetition_penalty", value) for value in (0, -1, 1e-30, 2.1, "x", True)],
    *[("logit_bias", value) for value in ({"7": 100.1}, {"7": -101}, {"7": "1"}, {"7": True}, {"7": None}, [], "7")],
    *[("logit_bias", {key: 1}) for key in ("abc", "-1", "07", "1.5", "", "\u0667", "9" * 30)],
    ("logit_bias", {str(index): 1 for index in range(1025)}),
]
NEUTRAL: list[tuple[str, Any]] = [
    ("frequency_penalty", -2),
    ("presence_penalty", 2),
    ("repetition_penalty", 2),
    ("repetition_penalty", 0.01),
    ("logit_bias", {}),
    ("logit_bias", {"0": -100, "1999": 100.0}),
    ("store", False),
    ("service_tier", "auto"),
    ("service_tier", "default"),
    ("user", "u"),
    ("metadata", {"a": "b"}),
    ("safety_identifier", "s"),
    ("prompt_cache_key", "k"),
    ("top_k", -1),
    ("seed", -5),
    ("stop", "x" * 128),
    ("cache_salt", "x" * 256),
    ("prompt_logprobs", 20),
]


@pytest.mark.parametrize(("read", "good"), BOTH)
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name(read: Any, good: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(good | {name: value})
    assert refusal.value.param == name


@pytest.mark.parametrize(("read", "good"), BOTH)
@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_a_value_at_its_limit_or_of_no_effect_is_accepted(
    read: Any, good: dict[str, Any], name: str, value: Any
) -> None:
    read(good | {name: value})


@pytest.mark.parametrize(("read", "good"), BOTH)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True),
        ("service_tier", "flex"),
        ("guided_decoding_backend", "x"),
        ("logits_processors", []),
        ("audio", {}),
        ("prediction", {}),
    ],
)
def test_what_is_not_built_is_refused_by_name(read: Any, good: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameterError) as refusal:
        read(good | {name: value})
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["audio"]),
        ("reasoning_effort", "low"),
        ("functions", [{}]),
        ("verbosity", "low"),
        ("moderation", {"model": "m"}),
        ("chat_template", "{{ messages }}"),
        ("web_search_options", {}),
    ],
)
def test_chat_fields_that_are_not_built_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameterError) as refusal:
        read_chat(CHAT | {name: value})
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template_kwargs", {}),
        ("tools", []),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("verbosity", "medium"),
        ("prompt_cache_options", {"mode": "implicit"}),
        ("prompt_cache_retention", "in_memory"),
        ("skip_special_tokens", True),
    ],
)
def test_chat_fields_whose_value_changes_nothing_are_accepted(name: str, value: Any) -> None:
    read_chat(CHAT | {name: value})


@pytest.mark.parametrize(("name", "value"), [("tools", []), ("chat_template_kwargs", {}), ("return_token_strs", False)])
def test_tokenize_takes_what_changes_no_prompt(name: str, value: Any) -> None:
    assert read_tokenize(CHAT | {name: value}) == read_tokenize(CHAT)


def test_a_round_trip_with_tools_is_a_conversation() -> None:
    calls = [
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "2", "function": CALL["function"]}]}
    ]
    answers = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("2", "1")]
    request = read_chat(CHAT | {"messages": [*CHAT["messages"], *calls, *answers]})
    assert [message.role for message in request.messages] == ["user", "assistant", "tool", "tool"]
    assert request.messages[1].content is None


@pytest.mark.parametrize(("name", "value"), [("top_logprobs", 1), ("tools", [{}]), ("suffix", "x"), ("best_of", 2)])
def test_completion_fields_that_are_not_built_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameterError) as refusal:
        read_completion(PROMPT | {name: value})
    assert refusal.value.param == name


@pytest.mark.parametrize(
    "fields",
    [
        *[{"logprobs": True, "top_logprobs": value} for value in (21, 10**6, -1, 1.5, "5", True)],
        {"top_logprobs": 5},
        {"logprobs": False, "top_logprobs": 5},
    ],
)
def test_a_chat_s_top_logprobs_go_to_20_and_want_logprobs(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_chat(CHAT | fields)
    assert refusal.value.param == "top_logprobs"


@pytest.mark.parametrize("value", [0, 5, "true", [], {}])
def test_a_chat_s_logprobs_are_true_or_false(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_chat(CHAT | {"logprobs": value})
    assert refusal.value.param == "logprobs"
    assert read_chat(CHAT | {"logprobs": True, "top_logprobs": 20}).top_logprobs == 20
    assert read_chat(CHAT | {"logprobs": False, "top_logprobs": 0}) == read_chat(CHAT)


@pytest.mark.parametrize("value", [-1, 21, 10**6, 1.5, True, False, "5"])
def test_a_completion_s_logprobs_are_a_number_to_20(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_completion(PROMPT | {"logprobs": value})
    assert refusal.value.param == "logprobs"
    assert [read_completion(PROMPT | {"logprobs": number}).logprobs for number in (0, 20, None)] == [0, 20, None]


def test_only_an_echoed_prompt_may_be_an_answer_of_no_tokens() -> None:
    assert read_completion(PROMPT | {"echo": True, "max_tokens": 0}).max_tokens == 0
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_tokens": -1, "echo": True}):
        with pytest.raises(InvalidRequestError) as refusal:
            read_completion(PROMPT | fields)
        assert refusal.value.param == "max_tokens"
    with pytest.raises(UnsupportedParameterError) as unsupported:
        read_chat(CHAT | {"echo": True})
    assert unsupported.value.param == "echo"


WRONG_TYPES: list[tuple[str, Any]] = [
    ("response_format", "json"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
    ("response_format", {"type": "text", "foo": 1}),
    ("guided_json", 5),
    ("guided_regex", []),
    ("guided_choice", "a"),
    ("guided_choice", [1]),
    ("guided_grammar", {}),
    ("structured_outputs", []),
    ("structured_outputs", {"foo": 1}),
]


@pytest.mark.parametrize(("read", "good"), BOTH)
@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_a_constraint_of_a_wrong_type_is_refused_by_name(
    read: Any, good: dict[str, Any], name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(good | {name: value})
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", "x"),
        ("tools", [{}]),
        ("tools", [{"type": "custom", "custom": {"name": "x"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": "yes"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "foo": 1}}]),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
        ("parallel_tool_calls", 1),
        ("add_generation_prompt", "yes"),
        ("continue_final_message", 1),
        ("chat_template_kwargs", []),
    ],
)
def test_what_only_chats_have_is_refused_by_name_where_its_type_is_wrong(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_chat(CHAT | {name: value})
    assert refusal.value.param == name
    with pytest.raises(UnsupportedParameterError) as unsupported:
        read_completion(PROMPT | {name: value})
    assert unsupported.value.param == name


def test_nulls_within_objects_are_absent_but_not_within_schemas() -> None:
    schema = {"enum": [None, 1], "default": None}
    function = {"name": "f", "description": None, "strict": None, "parameters": schema}
    request = read_chat(
        CHAT
        | {
            "tools": [{"type": "function", "function": function}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": None}},
            "structured_outputs": {"regex": None, "json": schema},
            "stream": True,
            "stream_options": {"include_usage": None},
            "metadata": {"a": None},
        }
    )
    assert request.tools[0].function.parameters == schema
    assert request.response_format is not None
    assert request.response_format.json_schema is not None
    assert request.response_format.json_schema.schema == schema
    assert request.structured_outputs is not None
    assert request.structured_outputs.json == schema
    assert request.metadata == {}


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("value", [True, False])
def test_parallel_calls_are_a_question_of_tools_as_openai_has_it(value: bool, tools: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_chat(CHAT | {"tools": tools, "parallel_tool_calls": value})
    assert refusal.value.param == "parallel_tool_calls"
    read_chat(CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": value})


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_min_tokens_are_no_more_than_either_limit(name: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_chat(CHAT | {"min_tokens": 5, name: 4})
    assert (refusal.value.param, name in str(refusal.value)) == ("min_tokens", True)
    assert read_chat(CHAT | {"min_tokens": 4, name: 4}).max_tokens == 4


def test_best_of_as_many_as_are_returned_changes_nothing() -> None:
    assert read_completion(PROMPT | {"n": 3, "best_of": 3}).n == 3


@pytest.mark.parametrize(("read", "good"), BOTH)
def test_null_is_absent_in_every_field(read: Any, good: dict[str, Any]) -> None:
    names = {name for name, _ in WRONG + NEUTRAL} - {"model"}
    nulls = dict.fromkeys([*names, "tools", "logprobs", "echo", "best_of", "foo_bar", "max_completion_tokens"])
    assert read(good | nulls) == read(good)


@pytest.mark.parametrize(("read", "good"), BOTH)
def test_names_that_nobody_knows_are_refused_and_cut(read: Any, good: dict[str, Any]) -> None:
    with pytest.raises(UnknownParameterError) as refusal:
        read(good | {"f" * 1000: 1})
    assert refusal.value.param == "f" * 64
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [5],
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "banana", "content": "x"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "user", "content": "x", "tool_calls": [CALL]}],
        [{"role": "user", "content": "x", "tool_call_id": "1"}],
        [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}],
        [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x", "tool_call_id": "2"}],
        [{"role": "assistant", "tool_calls": [CALL, CALL]}],
        [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}],
        [{"role": "function", "content": "x", "name": "f"}],
        [{"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}],
        [{"role": "user", "content": "x", "foo": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "parsed": {}}],
        [{"role": "user", "content": "x", "refusal": "no"}],
        [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}],
        [{"role": "assistant", "content": "x", "annotations": {}}],
        [{"role": "assistant", "content": "x", "refusal": 5}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no", "x": 1}]}],
        [{"role": "assistant", "content": "x", "audio": {"id": "a"}}],
        [{"role": "assistant", "content": "x", "tool_calls": [CALL | {"index": "0"}]}],
        [{"role": "assistant", "refusal": None}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
    ],
)
def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_chat(CHAT | {"messages": messages})
    assert refusal.value.param == "messages"


def test_what_means_nothing_in_a_message_is_dropped() -> None:
    full = {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "audio": None, "name": None}
    other = {"role": "assistant", "content": "x", "tool_calls": None}
    plain = read_chat(CHAT | {"messages": [{"role": "assistant", "content": "x"}]})
    assert read_chat(CHAT | {"messages": [full]}) == read_chat(CHAT | {"messages": [other]}) == plain


def test_both_names_of_max_tokens_must_agree() -> None:
    assert read_chat(CHAT | {"max_completion_tokens": 3}).max_tokens == 3
    assert read_chat(CHAT | {"max_completion_tokens": 3, "max_tokens": 3}).max_tokens == 3
    with pytest.raises(InvalidRequestError) as refusal:
        read_chat(CHAT | {"max_completion_tokens": 3, "max_tokens": 4})
    assert refusal.value.param == "max_completion_tokens"


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_chat(CHAT | {"min_tokens": 5, "max_tokens": 4})
    assert refusal.value.param == "min_tokens"


@pytest.mark.parametrize("body", [{"model": "m"}, {"model": "m", "prompt": "x", "messages": []}, {"prompt": "x"}])
def test_tokenize_takes_one_kind_of_prompt(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        read_tokenize(body)
