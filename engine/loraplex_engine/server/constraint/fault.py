"""The grammar library's errors as one short sentence: what is wrong and where, without its drawings of the text."""

from __future__ import annotations

import re

_MAX_REASON_CHARS = 300
_MAX_SNIPPET_CHARS = 40
# what it was doing, and names of tokens that are those of the trial
_NOISE = re.compile(r"while processing \S+|<non-verbose/>|; following special tokens are available: .*")
_REGEX_FAULT = re.compile(
    r'(?:invalid regex "(?:[^"\\]|\\.)*" \(in regex\): )?regex parse error:\n'
    r"(?P<drawing>.*?)^error: (?P<reason>[^\n]*)",
    re.DOTALL | re.MULTILINE,
)
_DRAWN = re.compile(r"^ {4}(?P<text>[^\n]*)\n {4}(?P<before> *)(?P<mark>\^+)", re.MULTILINE)
# lines of the grammar with their numbers, and what points into them
_EXCERPT = re.compile(r"^ +\d+ \|.*\n?|^ *\^ *\n?", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_OUR_PLACE = re.compile(r"^line \d+, column \d+: ")
_GBNF_PLACE = re.compile(r",?\s*'[^\n]*' \^ '[^\n]*'\s*$")
_IN_REGEX = "in a regular expression: "


def explain(error: str) -> str:
    """Return an error as one short sentence."""
    if error.startswith("NoExtension"):
        return "no text matches it."
    if error.startswith("oneOf constraints"):
        return "several alternatives of `oneOf` may hold at once; use `anyOf`, or tell them apart by a `const`."
    if "too many expressions constructed" in error:
        return "it is too complex; make it simpler."
    text = _REGEX_FAULT.sub(_say_regex_fault, _NOISE.sub(" ", error))
    text = _GBNF_PLACE.sub("", _EXCERPT.sub("", text))
    return shorten(_PLACE.sub(r"line \1, column \2: ", text))


def without_place(reason: str) -> str:
    """Return an explanation without its line and column."""
    return _OUR_PLACE.sub("", reason)


def of_regex(reason: str) -> str:
    """Return an explanation of a grammar that is one regular expression of a client."""
    # a slash ends an expression in a grammar, so it was escaped
    return without_place(reason).removeprefix(_IN_REGEX).replace("\\/", "/")


def shorten(text: str) -> str:
    """Return a text as one line of bounded length."""
    text = " ".join(text.split()).removesuffix(".")
    return (text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}…") + "."


def _say_regex_fault(found: re.Match[str]) -> str:
    drawn = _DRAWN.search(found["drawing"])
    start = len(drawn["before"]) if drawn else 0
    snippet = drawn["text"][start : start + min(len(drawn["mark"]), _MAX_SNIPPET_CHARS)] if drawn else ""
    return _IN_REGEX + found["reason"] + (f" at `{snippet}`" if snippet else "")
