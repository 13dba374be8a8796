"""Renders a base's chat template as `transformers` does: same jinja environment, same variables, sandboxed.

The source is `transformers.utils.chat_template_utils`; tests compare the two. Templates are the base's own, never an
adapter's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from loraplex_engine.errors import BaseUnsupportedError, InvalidRequestError

_MAX_REASON_CHARS = 300


class ChatTemplate:
    """One compiled template with the names of the base's special tokens (`bos_token` and so on)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _build_environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise BaseUnsupportedError(f"The base's chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.literal_text = _literal_text(tree)
        self.reads_name = _reads_key(tree, "name")

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the prompt's text.

        Raises:
            InvalidRequestError: The template refuses these messages; its own words are in the message.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # a template may fail in any way on messages that it does not expect
        except Exception as error:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {str(error)[:_MAX_REASON_CHARS]}", param="messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Dict:
    """`dict` without attributes through which a template could reach the interpreter."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """A namespace without underscored names; a template may write `namespace(self=...)`."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _build_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_format_now, dict=_Dict(), namespace=_Namespace)
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _literal_text(tree: nodes.Template) -> str:
    """All text that the template itself can write, its pieces apart by NUL so that a search cannot span two."""
    pieces = {node.data for node in tree.find_all(nodes.TemplateData)}
    pieces |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(pieces))


def _reads_key(tree: nodes.Template, key: str) -> bool:
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    items = {node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    return key in attributes | items
