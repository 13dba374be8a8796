"""Makes the grammar that the core takes from a task, and tries it; runs in the sandbox's process, which may be killed.

The text is hostile: a schema, a regular expression or a grammar of a tenant. What is returned has been compiled once
and followed for some characters, so that what is impossible or too complex is refused here and not in the core.
Source: llguidance 1.9.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint.fault import explain, of_regex, shorten, without_place
from loraplex_engine.server.constraint.node import Schema, children
from loraplex_engine.server.constraint.place import join
from loraplex_engine.server.constraint.recursion import can_end, find_stray
from loraplex_engine.server.constraint.schema import prepare_schema
from loraplex_engine.server.constraint.task import ChoiceTask, GrammarTask, JsonSchema, LarkTask, RegexTask, SchemaTask

# of processor time, of which the sandbox gives a task 250 ms
_MAX_LOCATING_S = 0.05
_NUM_TRIAL_BYTES = 16
_STACK_BYTES = 1 << 20
# what the grammar library accepts and a server cannot do: it would have to take tokens back, or to change the sampling
_RULE_OPTIONS = re.compile(r"^\s*[?!]?[A-Za-z_][\w-]*\s*\[[^\]]*\b(temperature|stop|max_tokens)\s*=", re.MULTILINE)
_TOKEN_RANGE = re.compile(r"<\[[^\]<>\n]*\]>")


def warm() -> None:
    """Import what compiling needs, and compile once."""
    compile_grammar(ChoiceTask(param="", choices=["yes", "no"]))


def compile_grammar(task: GrammarTask) -> str:
    """Return the grammar of a task as llguidance reads it.

    Raises:
        InvalidRequestError: It cannot be honoured: a keyword or construct that is not supported, nothing that matches,
            too complex. The message says what and, in a schema, where.
    """
    if isinstance(task, SchemaTask):
        return _compile_schema(task)
    if isinstance(task, LarkTask):
        return _compile_lark(task)
    from llguidance import LLMatcher

    if isinstance(task, RegexTask):
        grammar = LLMatcher.grammar_from_regex(task.pattern)
    else:
        # a Lark string is a JSON string
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, task.choices)))
    reason = _find_fault(grammar)
    if reason is not None:
        raise _refuse(task.param, of_regex(reason), task.param)
    return grammar


def _compile_schema(task: SchemaTask) -> str:
    from llguidance import LLMatcher

    schema = _prepare(task.schema, task.param)
    try:
        grammar = LLMatcher.grammar_from_json_schema(_dump(schema, task.schema))
    except ValueError as error:
        raise _refuse(task.schema.where, shorten(str(error)), task.param) from error
    reason = _find_fault(grammar)
    if reason is not None:
        raise _refuse(*_locate(schema, task.schema, reason), task.param)
    return grammar


def _compile_lark(task: LarkTask) -> str:
    from llguidance import LLMatcher

    text = task.text if task.schemas else _read_lark(task.text, task.param)
    name_to_schema = {name: _prepare(part, task.param) for name, part in task.schemas.items()}
    rules = [f"{name}: %json {_dump(schema, task.schemas[name])}" for name, schema in name_to_schema.items()]
    grammar = LLMatcher.grammar_from_lark("\n".join((text, *rules, "")))
    # the bytes of the trial are no vocabulary of a model: any special token is as good as another
    trial_text = _TOKEN_RANGE.sub(f"<[{_end_token()}]>", text)
    reason = _find_fault(LLMatcher.grammar_from_lark("\n".join((trial_text, *rules, ""))))
    if reason is None:
        return grammar
    for name, schema in name_to_schema.items():
        fault = _find_schema_fault(schema, task.schemas[name])
        if fault is not None:
            raise _refuse(*_locate(schema, task.schemas[name], fault), task.param)
    # a place in what was made of the text would lead nowhere
    raise _refuse(task.param, reason if text == task.text else without_place(reason), task.param)


def _refuse(where: str, reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{where}` cannot be honoured: {reason}", param=param)


def _read_lark(text: str, param: str) -> str:
    """Return a client's own grammar as Lark, from GBNF if that is what it is."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    lark = text
    if "::=" in text:
        try:
            lark = str(gbnf_to_lark(text))
        except Exception as error:  # the converter raises whatever its parsing raises
            raise _refuse(param, f"not GBNF: {explain(str(error))}", param) from error
    option = _RULE_OPTIONS.search(lark)
    if option is not None:
        raise InvalidRequestError(f"`{param}`: the rule option `{option[1]}` is not supported.", param=param)
    return lark


def _prepare(part: JsonSchema, param: str) -> Schema:
    schema = prepare_schema(part, param)
    stray = find_stray(schema)
    if stray is not None:
        raise InvalidRequestError(f"`{part.where}`: a `$ref` points to no schema: {shorten(stray)}", param=param)
    if not can_end(schema):
        raise InvalidRequestError(
            f"`{part.where}` describes no value that ends: an object must hold another of its kind, without end.",
            param=param,
        )
    return schema


def _dump(schema: Schema, part: JsonSchema) -> str:
    options: dict[str, Any] = {"whitespace_flexible": False}
    if part.is_lenient:
        options["lenient"] = True
    if part.is_spaced:
        options |= {"item_separator": ", ", "key_separator": ": "}
    return json.dumps({"x-guidance": options} | schema)


def _find_schema_fault(schema: Schema, part: JsonSchema) -> str | None:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(_dump(schema, part))
    except ValueError as error:
        return shorten(str(error))
    return _find_fault(grammar)


def _locate(schema: Schema, part: JsonSchema, reason: str) -> tuple[str, str]:
    """Return the deepest schema that has the same fault when it is compiled alone, as far as the time allows."""
    end_at = time.process_time() + _MAX_LOCATING_S
    shared: Schema = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
    node, where = schema, part.where
    while True:
        # what is shared is at fault rather than those that refer to it
        for names, child in sorted(children(node), key=lambda one: one[0][0] not in shared):
            if time.process_time() > end_at:
                return where, reason
            if isinstance(child, dict) and _find_schema_fault(shared | child, part) == reason:
                node, where = child, join(where, *names)
                break
        else:
            return where, reason


def _find_fault(grammar: str) -> str | None:
    """Compile a grammar, follow it some bytes within the core's limits and return what is wrong, None if nothing.

    The library goes as deep as the grammar does, and a stack that is too small ends the process: this one, which is
    there for it, and by a stack smaller than any thread of the core has.
    """
    before = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_try_grammar, grammar).result()
    finally:
        threading.stack_size(before)


def _try_grammar(grammar: str) -> str | None:
    from llguidance import LLMatcher

    from loraplex_engine.guide.vocabulary import build_limits

    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=build_limits())
    for _ in range(_NUM_TRIAL_BYTES):
        if matcher.is_error():
            break
        mask = matcher.compute_bitmask()
        token_id = _first_token(mask)
        if matcher.is_error() or matcher.is_stopped():
            break
        if token_id is None or token_id == _end_token() or not matcher.consume_token(token_id):
            break
    return explain(matcher.get_error()) if matcher.is_error() else None


def _first_token(mask: bytes) -> int | None:
    for index, byte in enumerate(mask):
        if byte:
            return index * 8 + (byte & -byte).bit_length() - 1
    return None


@functools.cache
def _bytes_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _end_token() -> int:
    return int(_bytes_tokenizer().eos_token)
