"""What is done with every field of OpenAI's request types and of ours: the decisions, as data.

A field that has no row fails `engine/server/test_openai_fields.py`, so a new version of the `openai` package asks for
new decisions. The rows are in `openai_rows.py` and `openai_rows_chat.py`; `openai_page.py` writes them into
`docs/openai.md`. A path is written as the body nests: `[]` is an element of a list, `=x` one value of a few. A refused
field decides what is below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from openai_answer import Endpoint

Verdict = Literal["honoured", "refused", "inert", "part"]
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
FIELDS_TEST = "engine/server/test_openai_fields.py::test_the_decision_is_what_happens"


@dataclass(frozen=True)
class Decision:
    """One field, or one value of a field.

    `honoured`: `example` changes what the core is asked or what the client is answered. `inert`: it is accepted and
    changes neither. `refused`: 400 that names the top-level field. `part`: belongs to the example of the field above.
    """

    path: str
    endpoints: tuple[Endpoint, ...]
    verdict: Verdict
    meaning: str
    example: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    """Fields that the example needs; the comparison has them, too."""
    test: str = FIELDS_TEST

    @property
    def param(self) -> str:
        """The top-level field."""
        return self.path.split(".")[0].split("[")[0].split("=")[0]


def honoured(
    path: str, ends: tuple[Endpoint, ...], meaning: str, test: str = FIELDS_TEST, *, given: Any = None, **example: Any
) -> Decision:
    return Decision(path, ends, "honoured", meaning, example, given or {}, test)


def inert(path: str, ends: tuple[Endpoint, ...], meaning: str, *, given: Any = None, **example: Any) -> Decision:
    return Decision(path, ends, "inert", meaning, example, given or {})


def refused(path: str, ends: tuple[Endpoint, ...], meaning: str, *, given: Any = None, **example: Any) -> Decision:
    return Decision(path, ends, "refused", meaning, example, given or {})


def part(path: str, ends: tuple[Endpoint, ...], meaning: str, test: str = FIELDS_TEST) -> Decision:
    return Decision(path, ends, "part", meaning, test=test)
