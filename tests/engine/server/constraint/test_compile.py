"""Regular expressions, choices and grammars: what they allow, what is refused, and that nothing hangs the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

import pytest

from grammar_walk import allows
from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint.compile import compile_grammar
from loraplex_engine.server.constraint.task import ChoiceTask, GrammarTask, JsonSchema, LarkTask, RegexTask, SchemaTask
from loraplex_engine.server.sandbox.client import Sandbox

ARGUMENTS = JsonSchema({"type": "object", "properties": {"q": {"type": "string"}}}, "tools[0].function.parameters")


def refuse(task: GrammarTask) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(task)
    assert caught.value.param == task.param
    return str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[a-z]+", "abc", "abcD"),
        ("^[a-z]+$", "abc", "1"),
        ("a|bc", "bc", "abc"),
        (r"\d{3}-\d{4}", "555-1234", "5551234"),
        ("(?i)yes", "YES", "no"),
        ("é+🙂", "éé🙂", "e"),
        ('a/b"c', 'a/b"c', "ab"),
    ],
)
def test_regex_matches_the_whole_text(pattern: str, good: str, bad: str) -> None:
    grammar = compile_grammar(RegexTask("guided_regex", pattern))
    assert allows(grammar, good)
    assert not allows(grammar, bad)


@pytest.mark.parametrize("choices", [["yes", "no"], ['a"b', "c\nd", "é\u2028🙂", "\x01", "a/b", "</x>", "\\"]])
def test_each_choice_is_allowed_and_nothing_else(choices: list[str]) -> None:
    grammar = compile_grammar(ChoiceTask("guided_choice", choices))
    assert [text for text in choices if not allows(grammar, text)] == []
    assert not allows(grammar, choices[0] + choices[1])


@pytest.mark.parametrize(
    "text", ['start: "a" INT\nINT: /[0-9]+/', 'root ::= "a" [0-9]+', 'root ::= "a" num\nnum ::= [0-9]+']
)
def test_grammar_may_be_lark_or_gbnf(text: str) -> None:
    grammar = compile_grammar(LarkTask("guided_grammar", text))
    assert allows(grammar, "a12")
    assert not allows(grammar, "a")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (RegexTask("guided_regex", "("), "unclosed group"),
        (RegexTask("guided_regex", "(?=a)b"), "look-ahead"),
        (RegexTask("guided_regex", r"(a)\1"), "backreferences are not supported"),
        (RegexTask("guided_regex", r"[^\s\S]"), "no text matches it"),
        (RegexTask("guided_regex", "^(a?){400}a{400}$"), "cannot be honoured"),
        (LarkTask("guided_grammar", "((("), "expecting rule"),
        (LarkTask("guided_grammar", "root ::= ("), "not GBNF"),
        (LarkTask("guided_grammar", 'foo: "a"'), "no start rule"),
        (LarkTask("guided_grammar", "start: x"), "unknown name"),
        (LarkTask("guided_grammar", 'start: start "a"'), "no text matches it"),
        (LarkTask("guided_grammar", "start[temperature=2]: /a+/"), "`temperature` is not supported"),
        (LarkTask("guided_grammar", 'start: a "b"\na[lazy,\n stop = "x"]: /.*/'), "`stop` is not supported"),
        (LarkTask("guided_grammar", "start: <|im_end|>"), "unknown special token"),
        (LarkTask("guided_grammar", 'start: %json {"not": {}}'), "Unimplemented keys"),
        (
            LarkTask(
                "tools", "start: args_0\n", {"args_0": JsonSchema({"properties": {"q": {"not": {}}}}, "tools[0].p")}
            ),
            "`tools[0].p.properties.q.not`: this keyword",
        ),
        (
            LarkTask(
                "tools",
                "start: args_0\n",
                {"args_0": JsonSchema({"properties": {"q": {"type": "string", "pattern": "("}}}, "tools[0].p")},
            ),
            "`tools[0].p.properties.q` cannot be honoured: in a regular expression: ",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(task: GrammarTask, message: str) -> None:
    assert message in refuse(task)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (RegexTask("p", "a("), "unclosed group at `(`."),
        (RegexTask("p", "a/b("), "unclosed group at `(`."),
        (RegexTask("p", "a/[z-/]"), "invalid character class range, the start must be <= the end at `z-/`."),
        (RegexTask("p", "a\nb("), "unclosed group at `(`."),
        (RegexTask("p", "(?i"), "expected flag but got end of regex."),
        (RegexTask("p", 'x"y(?=b)'), "look-around, including look-ahead and look-behind, is not supported at `(?=`."),
        (RegexTask("p", "((a{200}){200}){200}"), "it is too complex; make it simpler."),
        (
            LarkTask("p", 'start: "a" | b\nb: /c(/\n# end'),
            "line 2, column 4: in a regular expression: unclosed group at `(`.",
        ),
        (LarkTask("p", "start: b"), 'line 1, column 8: unknown name: "b".'),
        (LarkTask("p", "start: <|im_end|>"), 'line 1, column 8: unknown special token: "<|im_end|>".'),
        (LarkTask("p", 'root ::= "a" | [z-a]'), "in a regular expression: invalid character class range, the start"),
        (LarkTask("p", 'root ::= "a'), "not GBNF: Unexpected end of input at line 1."),
    ],
)
def test_a_refusal_is_one_sentence_without_drawings(task: GrammarTask, reason: str) -> None:
    text = refuse(task)
    assert text.startswith(f"`p` cannot be honoured: {reason}"), text
    assert not {"^", "\n"} & {*text}
    assert "|" not in text.replace("<|im_end|>", "")


def test_schemas_of_a_grammar_become_its_rules() -> None:
    grammar = compile_grammar(
        LarkTask("tools", 'start: "call " args_0 args_1?\n', {"args_0": ARGUMENTS, "args_1": ARGUMENTS})
    )
    assert allows(grammar, 'call {"q":"x"}')
    assert allows(grammar, 'call {"q":"x"}{}')
    assert not allows(grammar, "call ")


def test_special_tokens_beyond_the_trial_vocabulary_are_kept() -> None:
    assert "<[49154]>" in compile_grammar(LarkTask("tools", "start: <[49154]> args_0\n", {"args_0": ARGUMENTS}))


ANY_OF_TEN = [
    {"anyOf": [{"type": "object", "properties": {f"{c}{i}": {"const": i}}} for i in range(10)]} for c in "abcdefgh"
]
BOMBS: dict[str, GrammarTask] = {
    "exponential allOf": SchemaTask("p", JsonSchema({"allOf": ANY_OF_TEN}, "p")),
    "product of multiples": SchemaTask(
        "p", JsonSchema({"allOf": [{"type": "integer", "multipleOf": n} for n in (101, 103, 107, 109, 113, 127)]}, "p")
    ),
    "patterns at once": SchemaTask(
        "p", JsonSchema({"allOf": [{"type": "string", "pattern": f".*{c}.{{30}}x.*"} for c in "abcdefghij"]}, "p")
    ),
    "many properties": SchemaTask(
        "p", JsonSchema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(4500)}}, "p")
    ),
    "overlapping oneOf": SchemaTask(
        "p",
        JsonSchema(
            {"oneOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(500)]},
            "p",
        ),
    ),
    "long GBNF": LarkTask("p", "root ::= " + "(" * 5000),
    "a number that ends the process": LarkTask("p", 'start: %json {"type": "integer", "enum": [-1e19]}'),
    "deep rules": LarkTask("p", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2500)) + '\nr2500: "a"'),
    "regex": RegexTask("p", r"((((((a{1,99}){1,99}){1,99}b?){1,99}c?){1,99}d?){1,99}.*x.{200}y)*"),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_bomb_ends_in_the_sandbox_within_its_bounds(name: str) -> None:
    sandbox = Sandbox()
    try:
        async with asyncio.timeout(60):
            with contextlib.suppress(InvalidRequestError):
                await sandbox.compile(BOMBS[name])
        # whoever comes next is served
        assert await sandbox.compile(ChoiceTask("q", ["yes", "no"]))
    finally:
        sandbox.close()


def test_front_reads_constraints_without_the_grammar_library() -> None:
    code = (
        "import sys, loraplex_engine.server.constraint.field, loraplex_engine.server.constraint.compile;"
        "sys.exit(any(name in sys.modules for name in ('llguidance', 'torch', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
