"""Writes the decisions about OpenAI's request fields into docs/openai.md: `.venv/bin/python tests/openai_page.py`."""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from loraplex_engine.wire import field
from openai_rows import COMPLETION_FIELDS, OURS, SAMPLING
from openai_rows_chat import CHAT_FIELDS
from openai_table import BOTH, FIELDS_TEST, Decision

PAGE = Path(__file__).resolve().parents[1] / "docs" / "openai.md"
ROWS = (*SAMPLING, *CHAT_FIELDS, *COMPLETION_FIELDS, *OURS)
_HEAD = f"""# OpenAI's request fields, one by one

Written by `tests/openai_page.py`; edit the rows in `tests/openai_rows.py` and `tests/openai_rows_chat.py` instead.

What each field of the `openai` package's request types does here, down to the values of nested ones. A test walks those types, so a
new release of the package with a new field fails until the field is decided; another sends each row's example, streamed and not. What the
package's helpers (`parse`, `stream`) add to a message is decided, too: it is derived from fields that are honoured, so it is inert. [The HTTP
API](api.md#fields) says more of what is honoured.

| word | meaning |
|---|---|
| honoured | it does what OpenAI's API says of it, or what the row says |
| inert | accepted, and changes neither the tokens nor the answer |
| refused | 400 `invalid_request_error` with the top-level field in `param` |
| part | belongs to the field above it, and is tested with it |

A row without a test of its own is held by `{FIELDS_TEST}`: a field that is honoured must
change what the model is asked or what the client is answered, and one that is inert must change neither.

"""


def render_page() -> str:
    """Return the whole page."""
    sections = [
        ("Both routes", SAMPLING),
        ("Chats", CHAT_FIELDS),
        ("Completions", COMPLETION_FIELDS),
        ("Ours", OURS),
    ]
    return _HEAD + "\n".join(_render_section(*section) for section in sections) + _render_others()


def _render_section(title: str, rows: Iterable[Decision]) -> str:
    lines = [f"## {title}", "", "| field | route | | meaning | test |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_render, rows)]) + "\n"


def _render(row: Decision) -> str:
    route = "both" if row.endpoints == BOTH else row.endpoints[0]
    test = "" if row.test == FIELDS_TEST or row.verdict == "part" else f"`{row.test}`"
    return f"| `{row.path}` | {route} | {row.verdict} | {row.meaning.replace('|', chr(92) + '|')} | {test} |"


def _render_others() -> str:
    decided = {row.param for row in ROWS}
    neutral: Mapping[str, tuple[object, ...]] = {**field.NEUTRAL_CHAT, **field.NEUTRAL_COMPLETION}
    names = sorted((field.UNSUPPORTED | neutral.keys()) - decided)
    return (
        "\n## Of other engines\n\nKnown to engines of this kind, not built here, and refused as `unsupported_parameter`:\n"
        + ", ".join(f"`{name}`" for name in names)
        + ". Some of them have one value that changes nothing, which is taken. Any other name is `unknown_parameter`.\n"
    )


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
