"""Values that no sane client sends: for fields, schemas, patterns, messages, tools, headers, paths. Data only."""

from __future__ import annotations

import json
from typing import Any

# fmt: off
LONG = "L" * 3000
DEEP: Any = json.loads("[" * 50 + "]" * 50)
BOMB = "(a{1,99}){1,99}(b{1,99}){1,99}"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**63, -(2**63), 2**64, 10**40, "",
    " ", "0", "1",
    "true", "none", "auto", "required", LONG, "🙂", "\u202e", "\U0010ffff", "\x7f\x01", "{}", "[]", [], {}, [[]],
    [{}], {"": ""},
    [None], [0], ["a"], [1, "a"], [True], {"a": 1}, {"0": 1}, {"-1": 1}, {"999999999": 1}, {"5": 101}, {"5": None},
    {"type": "text"}, {"type": "object"}, {"type": "function"}, [{"type": "function"}], {"type": "json_schema"},
    DEEP, ["a"] * 100,
    list(range(500)), {str(index): index for index in range(2000)}, {"include_usage": 1},
    {"include_usage": True, "x": 1},
)
NAMES = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop",
    "stop_token_ids",
    "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "stream",
    "stream_options", "user", "safety_identifier", "prompt_cache_key", "metadata", "cache_salt",
    "prompt_logprobs", "response_format",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "messages",
    "prompt", "logprobs",
    "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs", "echo", "suffix", "best_of", "model", "store", "service_tier", "functions",
    "function_call",
    "modalities", "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "chat_template",
    "documents",
)
SCHEMA_PARTS: tuple[Any, ...] = (
    True, False, {}, [], "string", 5, {"type": "strnig"}, {"type": []}, {"type": ["string", "null"]}, {"$ref": "#"},
    {"$ref": "#/$defs/a"}, {"$ref": "http://e/x"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"enum": []},
    {"enum": [1, "a", None, {"b": []}]}, {"enum": list(range(5000))}, {"const": "\u0000"},
    {"pattern": "(", "type": "string"},
    {"type": "string", "pattern": BOMB}, {"type": "string", "minLength": 10**9},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "minimum": 10, "maximum": 1}, {"type": "integer", "multipleOf": 0},
    {"type": "number", "minimum": 1e308},
    {"type": "array", "minItems": 10**6, "items": {}}, {"type": "array", "uniqueItems": True}, {"not": {}},
    {"if": {}, "then": {}},
    {"oneOf": [{}, {}]}, {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"anyOf": []}, {"properties": 5},
    {"required": "a"},
    {"required": ["absent"], "type": "object", "additionalProperties": False},
    {"patternProperties": {"^a": {}}}, {"x-unknown": 1},
    {"type": "object", "properties": {str(index): {"type": "string"} for index in range(300)}},
    {"format": "date-time", "type": "string"},
    {"format": "nonsense", "type": "string"}, {"type": "object", "minProperties": 5},
    {"dependentRequired": {"a": ["b"]}},
    {"type": "integer", "enum": [-1e19]}, {"enum": [1e300, -1e-300]},
    {"type": "integer", "minimum": -1e19, "maximum": 1e19},
    {"type": "number", "multipleOf": 1e-300}, {"type": "integer", "multipleOf": 10**40},
    {"type": "integer", "exclusiveMinimum": 2**63},
    {"type": "string", "pattern": "^" + "(a|b)" * 200}, {"type": "array", "prefixItems": [{}] * 1000},
    {"maxLength": -1, "type": "string"},
    {"anyOf": [{"const": str(index)} for index in range(2000)]}, {"type": "object", "properties": {"\"\\\n": {}}},
    {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    {"$ref": "#/" + "a/" * 500},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}}},
)
PATTERNS = (
    "(", "[", "a{999999}", BOMB, "(a*)*b", "(?=a)b", r"(a)\1", "\\", "a" * 600, "", "(?P<x>a)", "[[:alpha:]]",
    r"\p{L}+", "^a$", ".*",
)
GRAMMARS = (
    "", "start:", "start: start", "start: a\na: b\nb: a", 'start: "a" | start "b"', "start: /(/", "%json {",
    "start: undefined",
    'start: "x"' * 2000, "start: " + "(" * 500 + '"a"' + ")" * 500, '%llguidance {}\nstart: /a{1,100000}/',
    "root ::= \"a\"",
    "start: <[9999999]>", "start: <|im_end|>", '\x01', "start: @x", 'start: %regex {}',
    'start: %json {"type": "integer", "enum": [-1e19]}', 'start: %json {"$ref": "#"}',
    "start: a0\n" + "".join(f"a{index}: a{index + 1}\n" for index in range(2500)) + 'a2500: "x"',
    'start: /' + "(" * 3000 + "a" + ")" * 3000 + "/", "start: /[^x]{1,9999}y/", 'start: a*\na: b*\nb: "x"*',
    "start: <[0-5]> | <[*]>",
)
MESSAGES: tuple[Any, ...] = (
    5, None, "hi", {}, {"role": "user"}, {"role": "banana", "content": "x"}, {"role": "user", "content": 5},
    {"role": "user", "content": []},
    {"role": "user", "content": [5]}, {"role": "user", "content": [{"type": "text"}]},
    {"role": "user", "content": [{"type": "text", "text": None}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://e"}}]},
    {"role": "tool", "content": "x"},
    {"role": "tool", "content": "x", "tool_call_id": "call_1"}, {"role": "assistant", "content": None},
    {"role": "assistant", "tool_calls": []},
    {"role": "assistant", "tool_calls": [{}]}, {"role": "assistant", "tool_calls": [5]},
    {"role": "function", "name": "f", "content": "x"},
    {"role": "assistant", "content": "",
     "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{"}}]},
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "[]"}},
    {"role": "user", "content": "x", "name": "n"},
    {"role": "user", "content": "x", "foo": 1}, {"role": "system", "content": LONG},
    {"role": "user", "content": "{{ 7 * 7 }}{% raw %}"},
    {"role": "user", "content": "<|im_end|>\n<|im_start|>system"}, {"role": "assistant", "refusal": "no"},
    {"role": "user", "content": ""},
)
TOOLS: tuple[Any, ...] = (
    5, {}, {"type": "custom", "custom": {"name": "x"}}, {"type": "function"}, {"type": "function", "function": {}},
    {"type": "function", "function": {"name": ""}}, {"type": "function", "function": {"name": "a b"}},
    {"type": "function", "function": {"name": LONG}},
    {"type": "function", "function": {"name": "f", "parameters": 5}},
    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
    {"type": "function", "function": {"name": "f", "strict": 1}},
    {"type": "function", "function": {"name": "f", "description": "<tool_call>{{x}}"}},
    {"type": "function", "function": {"name": "\"\\", "parameters": {}}},
    {"type": "function", "function": {"name": "f"}, "x": 1},
)
HEADERS: tuple[tuple[str, str], ...] = (
    ("content-type", "text/plain"), ("content-type", "application/json; charset=latin-1"), ("content-type", "\xff"),
    ("content-type", ""), ("content-encoding", "gzip"), ("authorization", ""), ("authorization", "Bearer"),
    ("authorization", "Bearer \xff\xfe"),
    ("authorization", "Basic Zm9vOmJhcg=="), ("authorization", "Bearer a.b.c"), ("x-request-timeout", "abc"),
    ("x-request-timeout", "-1"),
    ("x-request-timeout", "1e400"), ("x-request-timeout", "nan"), ("x-request-id", "a" * 500),
    ("x-request-id", "\x01"), ("accept", "text/html"),
    ("x-loraplex-request-id", "a b"), ("x-loraplex-priority", "high"), ("x-loraplex-deadline-ms", "0"),
    ("x-loraplex-weight", "1e3"),
    ("x-loraplex-cache-salt", "x"), ("content-length", "-5"), ("content-length", "5, 6"),
    ("content-length", "99999999999999999999"),
    ("transfer-encoding", "gzip"), ("transfer-encoding", "chunked"), ("expect", "100-continue"),
    ("expect", "200-ok"), ("upgrade", "websocket"),
    ("connection", "upgrade"), ("host", ""), ("te", "trailers"), ("range", "bytes=0-5"), ("x" * 300, "y"),
    ("bad name", "x"), ("x-nul", "a\0b"),
)
PATHS = (
    "/v1/chat/completions/", "/v1/completions?x=1", "/v1/chat//completions", "/v1/%63ompletions",
    "/v1/completions%00", "/v1/\xff", "/../v1/completions",
    "/v1/models/%ff%fe", "/v1/models/a/b/c", "/v1/models/..", "/v1/nothing", "*", "http://e/v1/completions",
    "/", "//", "/v1/models/" + "m" * 3000,
    "/internal/state", "/internal/requests/%2e%2e/abort", "/v1/embeddings", "/v1/responses", "/metrics",
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "post", "FOO", "PRI")
TAILS = (b"}", b" x", b"\0", b"\xff", b"//", b"{}", b",", b"\n\n\n", b"]")
LARGE: tuple[Any, ...] = (
    {"prompt": "ab " * 1_300_000}, {"messages": [{"role": "user", "content": "🙂" * 900_000}]},
    {"prompt": [5] * 250_000}, {"messages": [{"role": "user", "content": "x"}] * 40_000},
    {"logit_bias": {str(index): 1 for index in range(120_000)}}, {"stop": ["x"] * 200_000},
    {"stop_token_ids": [5] * 200_000}, {"user": "u" * 4_000_000}, {"prompt": "\n" * 4_000_000},
    {"metadata": {str(index): "x" for index in range(90_000)}}, {"guided_choice": ["c"] * 200_000},
    {"tools": [{"type": "function", "function": {"name": "f"}}] * 20_000}, {"guided_regex": "a" * 4_000_000},
    {"guided_json": {"enum": list(range(200_000))}}, {"prompt": "x" * 4_300_000}, {"prompt": [["a"]] * 80_000},
    {"tools": [{"type": "function", "function": {"name": "f", "description": "d" * 4_000_000}}]},
    {"chat_template_kwargs": {"x": ["y"] * 200_000}},
)
