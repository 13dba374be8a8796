"""Fuzz targets of the engine: bodies, calls of tools, grammars, templates, messages between processes, base models."""

from __future__ import annotations

import functools
import json
import random
import signal
from typing import Any

import msgspec

from fuzz_target import JSON_WORDS, KILLED_BY_LIMIT, Target, run_forked
from loraplex_engine.errors import EngineError, InvalidRequestError
from loraplex_engine.lora.packed import LoaderMessage
from loraplex_engine.server.call import read_caller
from loraplex_engine.server.chat_input import ChatInput, build_chat
from loraplex_engine.server.chat_template import ChatTemplate, compile_template
from loraplex_engine.server.constraint.compile import _bytes_tokenizer, compile_grammar
from loraplex_engine.server.constraint.field import read_constraint
from loraplex_engine.server.constraint.task import JsonSchema, LarkTask, RegexTask, SchemaTask
from loraplex_engine.server.core_client import CoreClient
from loraplex_engine.server.field.request import read_chat, read_completion, read_tokenize
from loraplex_engine.server.guard import read_identity
from loraplex_engine.server.tool.format import FORMATS
from loraplex_engine.server.tool.plan import build_plan
from loraplex_engine.server.tool.reader import CallReader
from loraplex_engine.wire import messages
from loraplex_engine.wire.openai import CompletionRequest
from loraplex_engine.wire.strict_json import decode_object
from loraplex_registry.peft.limit import MAX_CPU_S as TASK_CPU_S
from loraplex_registry.peft.limit import limit_task
from loraplex_registry.wire.identity import Identity
from template_texts import STYLES

_READERS = (read_chat, read_completion, read_tokenize)
_CALLER = Identity(role="tenant", tenant_id="t", tenant="t", scopes=("infer",), key_id="k", actor="a", request_id="r")
_PRIVATE = ("request-id", "tenant-id", "weight", "deadline-ms", "priority", "cache-salt", "echo-model", "done")
_NUM_FOLLOWED = 64


def fuzz_openai_body(data: bytes) -> None:
    """The first byte says the route; fields, constraint and tools are judged as for a request."""
    read: Any = _READERS[data[0] % 3] if data else read_chat
    request = read(decode_object(data[1:]))
    if read is read_tokenize:
        return
    constraint = read_constraint(request)
    if not isinstance(request, CompletionRequest):
        for form in FORMATS.values():
            build_plan(request, form, dict.fromkeys(form.marks, 1), constraint)


def fuzz_private_headers(data: bytes) -> None:
    """What the gateway says beside its token: a value a line."""
    lines = data.decode("latin-1").split("\n")
    headers = {f"x-loraplex-{name}": value for name, value in zip(_PRIVATE, lines, strict=False) if value}
    caller = read_caller(headers, _CALLER)
    assert caller.left_s > 0
    assert 1 <= caller.weight <= 1000


def fuzz_chat(data: bytes) -> None:
    """Messages, in the shape that each family's template reads, rendered by it."""
    request = read_chat(decode_object(data))
    for facts, template in _templates():
        try:
            chat = build_chat(ChatInput.of(request), facts, {})
            template.render(chat).encode()
        except InvalidRequestError as error:
            str(error).encode()


@functools.cache
def _templates() -> list[tuple[Any, ChatTemplate]]:
    compiled = [compile_template(source) for source in STYLES.values()]
    return [(one.facts, ChatTemplate(one.code, {"bos_token": "<s>", "eos_token": "</s>"})) for one in compiled]


def fuzz_tool_calls(data: bytes) -> None:
    """Text of a model, with calls of tools: whole or in pieces it is read alike, and nothing of it is lost."""
    choice, text = data[0] if data else 0, data[1:].decode("utf-8", "replace")
    form = list(FORMATS.values())[choice % len(FORMATS)]
    options = {"is_certain": bool(choice & 64), "has_answer": bool(choice & 128)}
    pieces, draw = [], random.Random(len(text))
    rest = text
    while rest:
        size = draw.randint(1, 5)
        pieces.append(rest[:size])
        rest = rest[size:]
    whole, cut = _read_calls(form, options, [text]), _read_calls(form, options, pieces)
    assert whole == cut, "it depends on the pieces"
    for _, arguments, is_whole in whole[1]:
        if is_whole:
            assert isinstance(json.loads(arguments), dict)


def _read_calls(form: Any, options: dict[str, bool], pieces: list[str]) -> tuple[str, list[tuple[str, str, bool]]]:
    reader = CallReader(form, ("f", "get_weather"), **options)
    parsed = [*(reader.push(piece) for piece in pieces), reader.flush()]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in (delta for one in parsed for delta in one.calls):
        if delta.name is not None:
            names[delta.index] = delta.name
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    calls = [(names[at], arguments[at], not reader.has_broken_call) for at in sorted(names)]
    return "".join(one.text for one in parsed), calls


def fuzz_schema(data: bytes) -> None:
    """A schema of a tenant, as the sandbox makes a grammar of it and the core follows that."""
    try:
        schema = decode_object(data)
    except EngineError:
        return
    _compile(SchemaTask("p", JsonSchema(schema, "p")))


def fuzz_grammar(data: bytes) -> None:
    """A regular expression, or a grammar in Lark or GBNF."""
    text = data[1:].decode("utf-8", "replace")
    _compile(RegexTask("p", text) if data[:1] == b"r" else LarkTask("p", text))


def _compile(task: Any) -> None:
    """In a fork: the sandbox may end, by limits or by the library's own stack; what it accepts must then hold."""
    _warm()

    def work() -> bytes:
        limit_task(TASK_CPU_S)
        try:
            return compile_grammar(task).encode()
        except (InvalidRequestError, MemoryError, RecursionError):
            return b""
        except UnicodeEncodeError:
            return b""

    grammar = run_forked(work, (*KILLED_BY_LIMIT, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
    if grammar:

        def follow() -> bytes:
            _follow(grammar.decode())
            return b"followed"

        assert run_forked(follow, ()) == b"followed"


@functools.cache
def _warm() -> None:
    from loraplex_engine.server.constraint.compile import warm

    warm()


def _follow(grammar: str) -> None:
    """Take some bytes as the core takes tokens; an error of the library is one request's, an end of it everybody's."""
    from llguidance import LLMatcher

    from loraplex_engine.guide.vocabulary import build_limits

    matcher, draw = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=build_limits()), random.Random(0)
    for _ in range(_NUM_FOLLOWED):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return
        allowed = [at for at in range(len(mask) * 8) if mask[at // 8] >> at % 8 & 1]
        if not allowed or not matcher.consume_token(draw.choice(allowed)):
            return


def fuzz_core_message(data: bytes) -> None:
    """What the core tells the front, and the front the core: one tagged message, or a refusal by the decoder."""
    if data[:1] == b"c":
        messages.decode_to_core(data[1:])
        return
    client = CoreClient()
    client.attach(lambda _: None)
    message = messages.decode_to_front(data[1:])
    client.receive(message)
    if isinstance(message, messages.TokenEvents):
        for event in message.events:
            list(event.prompt_logprobs)


def fuzz_loader_message(data: bytes) -> None:
    """What the loader tells the core."""
    msgspec.msgpack.decode(data, type=LoaderMessage)


def fuzz_guard(data: bytes) -> None:
    """The header Authorization of an engine without keys."""
    from loraplex_registry.wire.identity import TokenVerifier

    read_identity(TokenVerifier([], "engine"), data.decode("latin-1"))
    raise AssertionError("somebody came in")


def _tag(message: Any) -> bytes:
    return bytes(messages.encode(message))


_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
}
_COMPLETION = {"model": "m", "prompt": ["a"], "stop": ["x"], "logit_bias": {"5": 1.0}, "guided_regex": "a+", "n": 2}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "b"]}, "c": {"$ref": "#/$defs/d"}},
    "$defs": {"d": {"type": "array", "items": {"type": "number", "minimum": 1}}},
    "required": ["a"],
}
_SCHEMA_WORDS = (
    b'"$ref"',
    b'"#"',
    b'"anyOf"',
    b'"pattern"',
    b'"type"',
    b'"items"',
    b'"minimum"',
    b'"format"',
    b'"const"',
    b'"prefixItems"',
)
_CALL_WORDS = tuple(mark.encode() for form in FORMATS.values() for mark in form.marks)
ENGINE_TARGETS = (
    Target(
        "openai_body",
        fuzz_openai_body,
        (
            b"\x00"
            + json.dumps(
                _CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}}
            ).encode(),
            b"\x01" + json.dumps(_COMPLETION).encode(),
            b'\x02{"model": "m", "prompt": "a"}',
        ),
        (EngineError,),
        words=JSON_WORDS,
    ),
    Target(
        "private_headers",
        fuzz_private_headers,
        (b"req_1\nt\n5\n1000\n-1\nsalt\nteam-x\n1",),
        (EngineError,),
        words=(b"1e9", b"nan", b"_"),
    ),
    Target(
        "chat_messages",
        fuzz_chat,
        (json.dumps(_CHAT).encode(), b'{"model": "m", "messages": [{"role": "user", "content": "<|im_end|>"}]}'),
        (EngineError,),
        words=(*JSON_WORDS, b"developer", b"<|im_start|>", b"[INST]"),
    ),
    Target(
        "tool_calls",
        fuzz_tool_calls,
        (
            b'\x00a <tool_call>\n{"name": "f", "arguments": {"a": [1, "b\\""]}}\n</tool_call> b',
            b'\x01{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 1}}',
            b'\x02[TOOL_CALLS][{"name": "f", "arguments": {}}]',
            b'\x03[TOOL_CALLS]f[CALL_ID]x[ARGS]{"a": 1}',
            b'\x84<|tool_call|>[{"name": "f", "arguments": {}}]',
        ),
        words=(*_CALL_WORDS, b'"arguments": ', b'"name": "f"', b'{"a": 1}', b"; ", b"</tool_call>"),
    ),
    Target(
        "schema",
        fuzz_schema,
        (
            json.dumps(_SCHEMA).encode(),
            b'{"type": "string", "pattern": "^a+$"}',
            b'{"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 9}]}',
        ),
        words=(*JSON_WORDS, *_SCHEMA_WORDS),
    ),
    Target(
        "grammar",
        fuzz_grammar,
        (b"r[a-z]{2,5}(x|y)*", b'lstart: "a" x+\nx: /[0-9]/ | "b"', b'lroot ::= "a" [b-c]*'),
        words=(b"start: ", b"%json {}", b"::=", b"(?i)", b"{1000}", b"|", b"/"),
    ),
    Target(
        "core_message",
        fuzz_core_message,
        (
            b"f"
            + _tag(
                messages.TokenEvents(
                    [messages.TokenEvent("r", [1], "stop", stats=messages.RequestStats(1, 0, 1, 0, 0, 0, 0, 0))]
                )
            ),
            b"f" + _tag(messages.Reply(1, {"a": 1}, messages.ErrorInfo("c", "m"))),
            b"c" + _tag(messages.AddRequest("r", [1, 2], messages.SamplingParams(5))),
            b"f"
            + _tag(
                messages.TokenEvents(
                    [messages.TokenEvent("r", [1], prompt_logprobs=messages.PromptScores(1, bytes(8), bytes(4)))]
                )
            ),
        ),
        (msgspec.DecodeError,),
    ),
    Target(
        "loader_message",
        fuzz_loader_message,
        (b"\x83\xa4type\xa6failed\xa6digest\xa1d\xa5stage\xa1s", b"\x81\xa4type\xa4beat"),
        (msgspec.DecodeError,),
    ),
    Target(
        "engine_token",
        fuzz_guard,
        (b"Bearer eyJhbGciOiJFZERTQSIsImtpZCI6IngifQ.e30.AA", b"Bearer " + b"W1tb" * 300),
        (EngineError,),
        words=(b"Bearer ", b".", b"e30"),
    ),
)
