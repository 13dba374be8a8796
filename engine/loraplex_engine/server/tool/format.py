"""The forms in which model families write tool calls, as data, and which of them a chat template speaks.

A template that knows no tools, or writes calls in a form that is not here, gets `hermes` and our own words for the
prompt (`prompt.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from loraplex_engine.config import TOOL_CALL_PARSERS

# how templates of Llama 3 refuse a turn of several calls
_SINGLE = "single tool-call"
_ALL_MARKS = ("[ARGS]", "[CALL_ID]")


class ToolFormat(msgspec.Struct, frozen=True):
    """How calls stand in an answer's text.

    `body` is what follows `opener`: `objects` are JSON objects of a name and arguments, `list` is one JSON list of
    such, `named` is a bare name, `[ARGS]` and the arguments. The reader takes any of them; the grammar writes `body`.
    """

    name: str
    opener: str
    closer: str = ""
    body: Literal["objects", "list", "named"] = "objects"
    arguments_key: str = "arguments"
    gap: str = ""
    """Between opener, body and closer."""
    separator: str = ""
    """Between two calls."""
    is_opener_optional: bool = False
    """An answer may begin with the body."""
    is_single: bool = False
    """The template takes one call in a turn, so no grammar allows more."""
    writes_prompt: bool = False
    """The template does not say what tools there are, so we do."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything that may be a special token and must be text to the reader."""
        extra = _ALL_MARKS if self.body == "named" else ()
        return tuple(mark for mark in (self.opener, self.closer, *extra) if mark)


_HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", gap="\n", separator="\n")
_LLAMA3 = ToolFormat(
    "llama3_json", "<|python_tag|>", arguments_key="parameters", separator="; ", is_opener_optional=True
)
_MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", body="list", separator=", ")
_MISTRAL_NAMED = ToolFormat("mistral_named", "[TOOL_CALLS]", body="named")
_GRANITE = ToolFormat("granite", "<|tool_call|>", body="list", separator=", ")

FORMATS = {item.name: item for item in (_HERMES, _LLAMA3, _MISTRAL, _MISTRAL_NAMED, _GRANITE)}
"""By the name that `--tool-call-parser` takes."""
assert set(FORMATS) | {"auto"} == set(TOOL_CALL_PARSERS)


def choose_format(template: str | None, parser: str = "auto", *, knows_tools: bool) -> ToolFormat:
    """Return the form of calls that goes with a chat template.

    Args:
        template: Its source.
        parser: A name of `FORMATS`, or `auto` for what the template's own text shows.
        knows_tools: Whether it reads the tools of a request.
    """
    found = FORMATS.get(parser) or (_detect(template or "") if knows_tools else None)
    if found is not None and knows_tools:
        return msgspec.structs.replace(found, is_single=_SINGLE in (template or ""))
    return msgspec.structs.replace(found or _HERMES, writes_prompt=True)


def write_calls(calls: Sequence[tuple[str, str]], form: ToolFormat) -> str:
    """Return calls, each a name and its arguments as JSON text, in a family's form."""
    if form.body == "named":
        return "".join(f"{form.opener}{name}[ARGS]{arguments}" for name, arguments in calls)
    objects = [f'{{"name": {json.dumps(name)}, "{form.arguments_key}": {arguments}}}' for name, arguments in calls]
    if form.body == "list":
        return f"{form.opener}[{form.separator.join(objects)}]{form.closer}"
    opener = "" if form.is_opener_optional else form.opener
    return form.separator.join(f"{opener}{form.gap}{item}{form.gap}{form.closer}" for item in objects)


def _detect(template: str) -> ToolFormat | None:
    if "[TOOL_CALLS]" in template:
        return _MISTRAL_NAMED if "[ARGS]" in template else _MISTRAL
    if "<|tool_call|>" in template:
        return _GRANITE
    if "<tool_call>" in template and "<function=" not in template:
        return _HERMES
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return _LLAMA3
    return None
