"""What is to be made into a grammar; data only, from the front to the sandbox.

Each task names in `param` the field of the body that a refusal is about.
"""

from __future__ import annotations

from typing import Any

import msgspec


class JsonSchema(msgspec.Struct, frozen=True):
    """A JSON schema and its place in the body, e.g. `tools[0].function.parameters`."""

    schema: dict[str, Any] | bool
    where: str
    is_lenient: bool = False
    """Keywords that cannot be enforced are passed over, not refused."""
    is_spaced: bool = False
    """The text has a blank after each comma and colon, as models write the arguments of calls; else none."""


class SchemaTask(msgspec.Struct, frozen=True, tag="schema"):
    """JSON text that a schema allows."""

    param: str
    schema: JsonSchema


class RegexTask(msgspec.Struct, frozen=True, tag="regex"):
    """Text that a regular expression matches as a whole."""

    param: str
    pattern: str


class ChoiceTask(msgspec.Struct, frozen=True, tag="choice"):
    """One of some texts."""

    param: str
    choices: list[str]


class LarkTask(msgspec.Struct, frozen=True, tag="lark"):
    """Text that a Lark or GBNF grammar matches; each of `schemas` is a rule that `text` uses and does not define."""

    param: str
    text: str
    schemas: dict[str, JsonSchema] = {}


GrammarTask = SchemaTask | RegexTask | ChoiceTask | LarkTask
