"""What a chat template reads and writes, found in its syntax tree: so that nothing is handed to it in vain."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from jinja2 import meta, nodes

_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_SHAPE_TESTS = frozenset({"string", "iterable", "sequence", "mapping"})


class TemplateFacts(msgspec.Struct, frozen=True):
    """Facts of one template."""

    literal_text: str
    """All text that the template itself can write, its pieces apart by NUL so that a search cannot span two."""
    options: tuple[str, ...]
    """Variables that it reads beside messages, tools and the like."""
    reads_tools: bool
    reads_name: bool
    """Whether it uses the `name` of a message."""
    reads_parts: bool
    """Whether it goes through the parts of a content."""
    needs_parts: bool
    """Whether it does so without asking if the content is text."""
    tells_null: bool
    """Whether it asks if a content is null, which then must not be empty text."""
    knows_developer: bool


def find_facts(tree: nodes.Template) -> TemplateFacts:
    """Return the facts of a template."""
    literal_text = _literal_text(tree)
    variables = meta.find_undeclared_variables(tree)
    loops = list(tree.find_all(nodes.For))
    reads_parts = any(_is_content(loop.iter) for loop in loops)
    tests = list(tree.find_all(nodes.Test))
    return TemplateFacts(
        literal_text=literal_text,
        options=tuple(sorted(variables - _GIVEN)),
        reads_tools="tools" in variables,
        reads_name=_reads_of_message(tree, loops, "name"),
        reads_parts=reads_parts,
        needs_parts=reads_parts and not any(test.name in _SHAPE_TESTS and _is_content(test.node) for test in tests),
        tells_null=any(test.name == "none" and _is_content(test.node) for test in tests),
        knows_developer="developer" in literal_text,
    )


def _literal_text(tree: nodes.Template) -> str:
    pieces = {node.data for node in tree.find_all(nodes.TemplateData)}
    pieces |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(pieces))


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is the content of something, or a variable that is called so."""
    if isinstance(node, nodes.Name):
        return node.name == "content"
    return _read_key(node) == "content"


def _read_key(node: nodes.Node) -> str | None:
    """Return the `x` of `a.x`, `a['x']` and `a.get('x')`."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem):
        return _text_of(node.arg)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get" and node.args:
        return _text_of(node.args[0])
    return None


def _text_of(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _reads_of_message(tree: nodes.Template, loops: list[nodes.For], key: str) -> bool:
    """Whether `key` is read of a loop's or another variable that holds a message."""
    names = {"message"}
    names |= {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name) and _is_messages(loop.iter)}
    names |= {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_one_message(assign.node)
    }
    return any(_read_key(node) == key and _is_message(_owner(node), names) for node in _all_reads(tree))


def _all_reads(tree: nodes.Template) -> Iterator[nodes.Node]:
    yield from tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call))


def _owner(node: nodes.Node) -> nodes.Node:
    owner: nodes.Node = node.node.node if isinstance(node, nodes.Call) else node.node  # type: ignore[attr-defined]
    return owner


def _is_message(node: nodes.Node, names: set[str]) -> bool:
    return (isinstance(node, nodes.Name) and node.name in names) or _is_one_message(node)


def _is_one_message(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice) and _is_messages(node.node)


def _is_messages(node: nodes.Node) -> bool:
    """Whether an expression is the list of messages, or some of it, or a variable that is named so."""
    return any("messages" in name.name for name in [node, *node.find_all(nodes.Name)] if isinstance(name, nodes.Name))
