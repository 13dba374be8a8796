"""Says where and how a JSON value does not fit a type, in JSON's words rather than Python's.

Reads msgspec's errors, whose texts are part of its tests; one that is not known is passed on as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

_MAX_CHARS = 300
_MAX_SHOWN_CHARS = 64
_AT = re.compile(r" - at `(?:key` in `)?\$([^`]*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected (.*?)(?:, got `(\w+)`)?", re.DOTALL)
_CHOICE = re.compile(r"Invalid (?:enum )?value ", re.DOTALL)
_WORDS = {
    "array": "an array",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}
_GOT = _WORDS | {"bool": "a boolean"}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,)}


class Misfit(msgspec.Struct, frozen=True):
    """What is wrong with a value."""

    path: str
    """As the body nests, such as `messages[1].role`; empty for the body itself."""
    reason: str
    """Goes on where the path ends: `must be a string, not an object`."""
    is_unknown: bool = False
    """Nothing of this name is there to be set."""

    @property
    def field(self) -> str | None:
        """The top-level field."""
        return re.split(r"[.\[]", self.path, maxsplit=1)[0] or None


def find_misfit(error: msgspec.ValidationError, value: Any, kind: type) -> Misfit:
    """Return what an error says of `value`, which should be a `kind`."""
    text = str(error)
    at = _AT.search(text)
    reason = text[: at.start()] if at else text
    path = at[1] if at else ""
    unknown, missing = _UNKNOWN.fullmatch(reason), _MISSING.fullmatch(reason)
    if unknown:
        return Misfit(_join(path, unknown[1][:_MAX_SHOWN_CHARS]), "is unknown", is_unknown=True)
    if missing:
        return Misfit(_join(path, missing[1]), "is missing")
    steps = [name or index for name, index in _STEP.findall(path)]
    expected = _EXPECTED.fullmatch(reason)
    if expected:
        wanted, got = expected[1].strip("`"), expected[2]
        path = _name_keys(path, steps, value, wanted)
        return Misfit(path.removeprefix("."), _say_type(expected[1], got))
    if _CHOICE.match(reason):
        found = _follow(value, steps)
        return Misfit(path.removeprefix("."), f"must be {_say_choices(kind, steps)}, not {show(found)}")
    return Misfit(path.removeprefix("."), f"is not right: {reason[:_MAX_CHARS]}")


def show(value: Any) -> str:
    """Return a value as short JSON in ASCII."""
    value = value[: _MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value
    text = ascii(msgspec.json.encode(value).decode())[1:-1].replace("\\\\", "\\")
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def _say_type(expected: str, got: str | None) -> str:
    names = expected.strip("`").split(" | ")
    if all(name in _WORDS or name == "null" for name in names):
        # null is the same as absent
        phrase = _list_words([_WORDS[name] for name in names if name != "null"]) or "null"
    else:
        phrase = re.sub(r"`(\w+)`", lambda name: _WORDS.get(name[1], name[1]), expected)
    if got is None:
        return f"must be {phrase}"
    if got == "float" and "int" in names and "float" not in names:
        return f"must be {phrase}, not a decimal number"
    return f"must be {phrase}, not {_GOT.get(got, got)}"


def _list_words(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _name_keys(path: str, steps: Sequence[str], value: Any, wanted: str) -> str:
    """Return the path with the key of the value that is not of the wanted type, which msgspec leaves out."""
    if path.count("[...]") != 1 or wanted not in _PYTHON_TYPES:
        return path
    holder = _follow(value, steps[: steps.index("...")])
    if not path.endswith("[...]") or not isinstance(holder, dict):
        return path
    for key, item in holder.items():
        if not isinstance(item, _PYTHON_TYPES[wanted]) or isinstance(item, bool):
            return path.replace("[...]", f"[{show(key)}]")
    return path


def _follow(value: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def _say_choices(kind: type, steps: Sequence[str]) -> str:
    found = [_type_info(kind)]
    for step in steps:
        found = [inner for outer in found for inner in _step_into(outer, step)]
    flat = [one for outer in found for one in _flatten(outer)]
    values = [value for one in flat if isinstance(one, inspect.LiteralType) for value in one.values]
    words = [show(value) for value in values]
    if any(isinstance(one, inspect.StructType) for one in flat):
        words.append("an object")
    return _list_words(words) or "another value"


@functools.cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _flatten(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _flatten(one)
    elif isinstance(kind, inspect.Metadata):
        yield from _flatten(kind.type)
    else:
        yield kind


def _step_into(outer: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for kind in _flatten(outer):
        if isinstance(kind, inspect.StructType):
            yield from (field.type for field in kind.fields if field.encode_name == step)
            if kind.tag_field == step:
                yield inspect.LiteralType((kind.tag,))
        elif isinstance(kind, inspect.ListType):
            yield kind.item_type
        elif isinstance(kind, inspect.DictType):
            yield kind.value_type
