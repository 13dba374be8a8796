"""Makes the grammar that the core takes; runs in the sandbox's process."""

from __future__ import annotations

import json

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint.task import ChoiceTask, GrammarTask, JsonSchema, RegexTask, SchemaTask


def warm() -> None:
    """Import what compiling needs."""
    import llguidance  # noqa: F401


def compile_grammar(task: GrammarTask) -> str:
    """Return the grammar of a task.

    Raises:
        InvalidRequestError: It cannot be honoured.
    """
    from llguidance import LLMatcher

    try:
        if isinstance(task, SchemaTask):
            text = json.dumps(task.schema.schema)
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        elif isinstance(task, RegexTask):
            grammar = LLMatcher.grammar_from_regex(task.pattern)
        elif isinstance(task, ChoiceTask):
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, task.choices)))
        else:
            rules = [f"{name}: %json {_write(schema)}\n" for name, schema in task.schemas.items()]
            grammar = LLMatcher.grammar_from_lark(task.text + "".join(rules))
    except ValueError as error:
        raise InvalidRequestError(str(error)[:300], param=task.param) from error
    return str(grammar)


def _write(schema: JsonSchema) -> str:
    options: dict[str, object] = {"whitespace_flexible": False, "lenient": schema.is_lenient}
    if schema.is_spaced:
        options |= {"item_separator": ", ", "key_separator": ": "}
    content = schema.schema if isinstance(schema.schema, dict) else {}
    return json.dumps(content | {"x-guidance": options})
