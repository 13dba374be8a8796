"""Grammars of tool calls: what an answer that calls tools may look like, as Lark with one schema for each tool.

Pure; the schemas are judged where the grammar is compiled (`server/constraint/compile.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex_engine.server.constraint.task import JsonSchema, LarkTask
from loraplex_engine.server.tool.format import ToolFormat
from loraplex_engine.wire.openai import Tool

_ANSWER = "answer"
_ANY_TEXT = "(.|\\n)*"
# what does not look like a call where calls need no opener
_NOT_A_CALL = "([ \\t\\r\\n]*[^ \\t\\r\\n{\\[](.|\\n)*)?"
# beside other keywords closing an object could make it impossible
_CLOSABLE = frozenset(
    ("type", "properties", "required", "title", "description", "$defs", "definitions", "$schema", "$id", "examples")
)


def build_grammar(
    tools: Sequence[tuple[int, Tool]],
    form: ToolFormat,
    special_ids: Mapping[str, int],
    *,
    is_required: bool,
    is_parallel: bool,
    answer: JsonSchema | None = None,
) -> LarkTask:
    """Return the grammar of an answer.

    Args:
        tools: Those that may be called, with their indices in the request.
        form: How calls are written.
        special_ids: Text to id of the vocabulary's special tokens.
        is_required: Whether the answer is calls and nothing else.
        is_parallel: Whether there may be several calls.
        answer: What an answer without calls must match; None is any text.
    """
    mark = _Marks(special_ids)
    schemas = {
        f"args_{number}": _read_schema(tool, f"tools[{index}].function.parameters")
        for number, (index, tool) in enumerate(tools)
    }
    call = " | ".join(f"call_{number}" for number in range(len(tools)))
    rules = [f"call: {call}"]
    rules += [f"call_{number}: {_write_call(tool, form, mark, number)}" for number, (_, tool) in enumerate(tools)]
    rules += _write_blocks(form, mark, is_parallel=is_parallel)
    if is_required:
        rules.append("start: calls")
    elif answer is not None:
        rules.append(f"start: calls | {_ANSWER}")
        schemas[_ANSWER] = answer
    else:
        rules += _write_auto(form, mark, is_parallel=is_parallel)
    return LarkTask(param="tools", text="\n".join(rules) + "\n", schemas=schemas)


class _Marks:
    """Writes marks as special tokens where the vocabulary has them, else as text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids

    def write(self, text: str) -> str:
        """Return the terminal of one mark or of plain text."""
        return f"<[{self._ids[text]}]>" if text in self._ids else _quote(text)

    def is_special(self, text: str) -> bool:
        """Whether the mark is one token."""
        return text in self._ids


def _write_call(tool: Tool, form: ToolFormat, mark: _Marks, number: int) -> str:
    name = tool.function.name
    if form.body == "named":
        return f"{_quote(name)} {mark.write('[ARGS]')} args_{number}"
    return f'{_quote(_head(name, form))} args_{number} "}}"'


def _head(name: str, form: ToolFormat) -> str:
    return f'{{"name": {json.dumps(name)}, {json.dumps(form.arguments_key)}: '


def _write_blocks(form: ToolFormat, mark: _Marks, *, is_parallel: bool) -> list[str]:
    """Return the rules of `calls`, a whole run of calls, and of `behind_opener`, the same without its first opener."""
    if form.body == "list":
        more = f" ({_quote(form.separator)} call)*" if is_parallel else ""
        return [f'behind_opener: "[" call{more} "]"', f"calls: {mark.write(form.opener)} behind_opener"]
    gap = [_quote(form.gap)] if form.gap else []
    end = [*gap, mark.write(form.closer)] if form.closer else []
    one = " ".join([*gap, "call", *end])
    opener = [] if form.is_opener_optional else [mark.write(form.opener)]
    separator = [_quote(form.separator)] if form.separator else []
    more = f" ({' '.join([*separator, *opener, one])})*" if is_parallel else ""
    return [f"behind_opener: {one}{more}", f"calls: {' '.join([*opener, 'behind_opener'])}"]


def _write_auto(form: ToolFormat, mark: _Marks, *, is_parallel: bool) -> list[str]:
    """Return the rules of text in which calls may stand where their opener appears, or of calls at once."""
    if form.is_opener_optional:
        return ["start: calls | TEXT", f"TEXT: /{_NOT_A_CALL}/"]
    if mark.is_special(form.opener):
        begin = [f"begin: TEXT {mark.write(form.opener)}"]
    else:
        begin = [f"begin[lazy]: TEXT {_quote(form.opener)}"]
    start = "start: (begin behind_opener)* TEXT" if is_parallel else "start: TEXT | begin behind_opener"
    return [start, f"TEXT: /{_ANY_TEXT}/", *begin]


def _quote(text: str) -> str:
    return json.dumps(text)


def _read_schema(tool: Tool, where: str) -> JsonSchema:
    schema: dict[str, Any] = tool.function.parameters or {}
    return JsonSchema(_close(schema), where, is_lenient=not tool.function.strict, is_spaced=True)


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    """Say that arguments are an object of the properties that are named, which is what a weak model needs to end."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_plain = isinstance(properties, dict) and isinstance(required, list)
    # anything but names is refused where the grammar is compiled
    is_plain = is_plain and all(isinstance(name, str) and name in properties for name in required)
    if is_plain and schema.keys() <= _CLOSABLE:
        return {"type": "object"} | schema | {"properties": properties, "additionalProperties": False}
    return {"type": "object"} | schema
