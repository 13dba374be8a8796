"""What one request makes of its tools: who may be called, the grammar if there must be one, and readers of the answers.

Calls are free as long as nothing is promised about them. A grammar holds where something is: `required`, one function,
a subset of the tools, `strict`, or no more than one call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint.task import GrammarTask, JsonSchema, SchemaTask
from loraplex_engine.server.tool.delta import ToolReader
from loraplex_engine.server.tool.format import ToolFormat
from loraplex_engine.server.tool.grammar import build_grammar
from loraplex_engine.server.tool.reader import CallReader
from loraplex_engine.wire.openai import AllowedToolChoice, ChatRequest, NamedToolChoice, Tool

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 18
"""Of all schemas together, as JSON."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolPlan(msgspec.Struct, frozen=True):
    """How the answers of one request call tools."""

    form: ToolFormat
    names: tuple[str, ...]
    is_required: bool
    grammar: GrammarTask | None
    visible: frozenset[int]
    """Special tokens that are text to the reader."""
    has_answer: bool = False
    """An answer without calls is JSON that a schema allows."""

    def build_reader(self) -> ToolReader:
        """Return the reader of one choice."""
        is_certain = self.grammar is not None
        return CallReader(
            self.form,
            self.names,
            is_certain=is_certain,
            is_only_calls=self.is_required,
            has_answer=self.has_answer,
        )


def offered_tools(request: ChatRequest) -> list[Tool]:
    """Return the tools that the model is told of."""
    return [] if request.tool_choice == "none" else list(request.tools or ())


def build_plan(
    request: ChatRequest, form: ToolFormat, special_ids: Mapping[str, int], constraint: GrammarTask | None
) -> ToolPlan | None:
    """Return the plan, or None if no answer of this request calls tools.

    Args:
        request: Its tools, `tool_choice` and `parallel_tool_calls` are read.
        form: How its template writes calls.
        special_ids: Text to id of the vocabulary's special tokens.
        constraint: What else its answers must match.

    Raises:
        InvalidRequestError: Tools, choice and constraint cannot be had together; `param` names the field.
    """
    _check_tools(request.tools or ())
    allowed, is_required = _choose(request)
    if not offered_tools(request):
        return None
    answer = _check_constraint(constraint, is_required=is_required)
    is_promised = is_required or answer is not None or len(allowed) < len(request.tools)
    is_promised |= any(tool.function.strict for _, tool in allowed)
    grammar = None
    if is_promised or request.parallel_tool_calls is False:
        grammar = build_grammar(
            allowed,
            form,
            special_ids,
            is_required=is_required,
            is_parallel=_is_parallel(request, form),
            answer=answer,
        )
    return ToolPlan(
        form=form,
        names=tuple(tool.function.name for _, tool in allowed),
        is_required=is_required,
        grammar=grammar,
        visible=frozenset(special_ids[mark] for mark in form.marks if mark in special_ids),
        has_answer=answer is not None,
    )


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"`tools` may hold at most {MAX_TOOLS} tools.", param="tools")
    seen: set[str] = set()
    size = 0
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}].function", tool.function
        if _NAME.fullmatch(function.name) is None:
            raise InvalidRequestError(
                f"`{where}.name` must have 1 to 64 letters, digits, underscores or dashes.", param="tools"
            )
        if function.name in seen:
            raise InvalidRequestError(f"`{where}.name` is {function.name!r} a second time.", param="tools")
        seen.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequestError(f"`{where}.parameters.type` must be 'object'.", param="tools")
        size += len(msgspec.json.encode(function.parameters))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequestError(
            f"The schemas in `tools` take {size} bytes; all together may take {MAX_TOOLS_BYTES}.", param="tools"
        )


def _choose(request: ChatRequest) -> tuple[list[tuple[int, Tool]], bool]:
    """Return the tools that may be called, with their indices, and whether one must be."""
    choice, tools = request.tool_choice, list(enumerate(request.tools or ()))
    if choice is not None and choice != "none" and not tools:
        raise InvalidRequestError("`tool_choice` needs `tools`.", param="tool_choice")
    if isinstance(choice, NamedToolChoice):
        return _pick(tools, [choice.function.name]), True
    if isinstance(choice, AllowedToolChoice):
        subset = choice.allowed_tools
        if not subset.tools:
            raise InvalidRequestError("`tool_choice.allowed_tools.tools` must not be empty.", param="tool_choice")
        return _pick(tools, [tool.function.name for tool in subset.tools]), subset.mode == "required"
    return tools, choice == "required"


def _is_parallel(request: ChatRequest, form: ToolFormat) -> bool:
    is_named = isinstance(request.tool_choice, NamedToolChoice)
    return request.parallel_tool_calls is not False and not is_named and not form.is_single


def _pick(tools: Sequence[tuple[int, Tool]], names: Sequence[str]) -> list[tuple[int, Tool]]:
    unknown = sorted(set(names) - {tool.function.name for _, tool in tools})
    if unknown:
        raise InvalidRequestError(
            f"`tool_choice` names {unknown[0][:64]!r}, which is not among `tools`.", param="tool_choice"
        )
    return [(index, tool) for index, tool in tools if tool.function.name in names]


def _check_constraint(constraint: GrammarTask | None, *, is_required: bool) -> JsonSchema | None:
    """Return the schema of an answer without calls; other constraints do not go with tools."""
    if constraint is None:
        return None
    if is_required or not isinstance(constraint, SchemaTask):
        reason = "the answer must be a call" if is_required else "only a JSON schema does"
        raise InvalidRequestError(
            f"`{constraint.param}` does not go with these `tools`: {reason}; leave out one of them.",
            param=constraint.param,
        )
    return constraint.schema
