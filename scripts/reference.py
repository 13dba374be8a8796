"""Writes docs/reference/ from the code: `python scripts/reference.py`; with --check it says which pages are old."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from loraplex.cli.app import build_app
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.gateway.problem import CODE_TO_STATUS, Problem
from loraplex.openapi.document import OPERATIONS
from loraplex.openapi.failure import list_codes
from loraplex.openapi.operation import Operation
from loraplex_engine.metrics import EngineMetrics, EngineSnapshot
from loraplex_engine.server.metric import FrontMetrics
from loraplex_registry.api.metric import RegistryMetrics
from loraplex_registry.wire.setting import SETTINGS, Setting

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
ERROR_MODULES = (
    "loraplex.errors",
    "loraplex.client.errors",
    "loraplex.bench.errors",
    "loraplex_engine.errors",
    "loraplex_registry.errors",
    "loraplex_registry.peft.errors",
)
_WIDTH = 148
_NOTE = "Written by `python scripts/reference.py` from the code; do not edit."


def main() -> int:
    """Write the pages, or compare them; returns 1 where one is not as it should be."""
    pages = build_pages()
    if "--check" in sys.argv[1:]:
        old = [name for name, text in pages.items() if read_page(name) != text]
        if old:
            print(f"not current: {', '.join(old)}; run python scripts/reference.py")
        return int(bool(old))
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


def read_page(name: str) -> str:
    """Return a page as it is, empty if there is none."""
    path = FOLDER / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def build_pages() -> dict[str, str]:
    """Return all pages by their names."""
    return {
        "cli.md": build_cli(),
        "settings.md": build_settings(SETTINGS),
        "metrics.md": build_metrics(),
        "errors.md": build_errors(),
        "api.md": build_api(OPERATIONS),
    }


def build_cli() -> str:
    """All commands with all flags, as `--help` has them."""
    text = build_app().generate_docs(output_format="markdown")
    text = re.sub(r"^# .*?(?=^## )", "", text, count=1, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^## Table of Contents.*?(?=^## loraplex)", "", text, flags=re.MULTILINE | re.DOTALL)
    # a console block shows what was typed; these are patterns
    text = text.replace("```console", "```text")
    lines = [wrapped for line in text.splitlines() for wrapped in _wrap(line)]
    intro = "What the commands mean together, and how they are used: [command line](../cli.md)."
    return _join("Command line: all flags", intro, "\n".join(lines).strip())


def build_settings(settings: Sequence[Setting]) -> str:
    """All settings by the part that reads them."""
    built = [one for one in settings if one.is_built]
    rows = [
        [
            f"`{one.name}`",
            ", ".join(one.parts),
            _show_default(one),
            _cell(one.meaning) + (" (secret)" if one.is_secret else ""),
            ", ".join(one.reloads),
        ]
        for one in built
    ]
    later = ", ".join(f"`{one.name}`" for one in settings if not one.is_built)
    intro = (
        "Each `X` may be given as `X_FILE`, a path to a file that holds the value. What they mean together, and what "
        "is chosen where nothing is given: [settings](../settings.md)."
    )
    refused = [f"Names that are kept for later, and refused until then: {later}."] if later else []
    return _join(
        "Settings",
        intro,
        _table(("setting", "read by", "default", "meaning", "read anew on SIGHUP by"), rows),
        *refused,
    )


def build_metrics() -> str:
    """All metrics of each process, with labels and the bounds of buckets."""
    engine = EngineMetrics()
    engine.watch(lambda: EngineSnapshot(0.0, *[0] * 15, *[{"x": 0}] * 5))
    processes = (
        ("Gateway", [GatewayMetrics().registry]),
        ("Engine", [engine.registry, FrontMetrics()._registry]),
        ("Registry of its own", [RegistryMetrics()._registry]),
    )
    parts = []
    for title, registries in processes:
        rows = sorted(row for registry in registries for row in _list_metrics(registry))
        parts += [f"## {title}", _table(("metric", "type", "labels", "meaning"), [row[:4] for row in rows])]
        bounds = [[row[0], row[4]] for row in rows if row[4]]
        if bounds:
            parts += ["Upper bounds of buckets (`le`), beside `+Inf`:", _table(("histogram", "le"), bounds)]
    intro = "What to look at first, and what the figures say: [metrics](../metrics.md)."
    return _join("Metrics", intro, *parts)


def build_errors() -> str:
    """All codes with status, type and the sentence that is said where there is no better one."""
    rows = []
    code_to_message = dict(_list_errors())
    for code in sorted(set(code_to_message) | set(CODE_TO_STATUS)):
        status = CODE_TO_STATUS.get(code)
        kind = Problem(status, "", code).body["error"]["type"] if status else ""
        name = f"[`{code}`](../errors.md#{code})"
        rows.append([name, str(status or ""), kind, _cell(code_to_message.get(code, ""))])
    intro = (
        "A code without a status is of the command line or of a part's start. What each means and what to do about it: "
        "[errors](../errors.md)."
    )
    return _join("Error codes", intro, _table(("code", "status", "type", "default message"), rows))


def build_api(operations: Iterable[Operation]) -> str:
    """All operations of the gateway."""
    listed = list(operations)
    everywhere = set.intersection(*map(list_codes, listed))
    parts = [f"Any operation may also be refused with {_list_codes(everywhere)}; those below are beyond that."]
    for tag in dict.fromkeys(one.tag for one in listed):
        parts.append(f"## {tag[:1].upper()}{tag[1:]}")
        rows = [
            [
                f"`{one.method.upper()} {one.path}`",
                _cell(one.summary),
                ", ".join(f"`{found.name}`" for found in one.parameters if found.place == "query"),
                ", ".join(str(answer.status) for answer in one.answers),
                _list_codes(list_codes(one) - everywhere),
            ]
            for one in listed
            if one.tag == tag
        ]
        parts.append(_table(("operation", "does", "query", "answers", "refusals"), rows))
    intro = (
        "The same as OpenAPI 3.1: `GET /openapi.json` of a gateway. What it means: [inference](../openai.md), "
        "[management](../management-api.md), [adapters](../adapter-api.md), [escalations](../escalation.md)."
    )
    return _join("API", intro, *parts)


def _show_default(setting: Setting) -> str:
    """What holds where nothing is given, by part where these differ."""
    if setting.part_to_default:
        by_default: dict[str, list[str]] = {}
        for part, default in setting.part_to_default.items():
            by_default.setdefault(default, []).append(part)
        return ", ".join(f"`{default}` ({', '.join(parts)})" for default, parts in by_default.items())
    return f"`{setting.default}`" if setting.default is not None else _cell(setting.otherwise)


def _list_codes(codes: Iterable[str]) -> str:
    return ", ".join(f"`{code}`" for code in sorted(codes))


def _list_metrics(registry: CollectorRegistry) -> Iterator[list[str]]:
    """Name, type, labels, meaning and bounds of each."""
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            if family.name.endswith("_created"):
                continue
            labels = getattr(collector, "_labelnames", None) or sorted(
                {label for sample in family.samples for label in sample.labels if label != "le"}
            )
            name = f"{family.name}_total" if family.type == "counter" else family.name
            meaning = _cell(family.documentation.rstrip("."))
            shown = ", ".join(f"`{label}`" for label in labels)
            yield [f"`{name}`", family.type, shown, meaning, _list_bounds(collector)]


def _list_bounds(collector: Any) -> str:
    bounds = getattr(collector, "_bounds", None) or getattr(collector, "_kwargs", {}).get("buckets")
    return ", ".join(f"{bound:g}" for bound in bounds or () if bound != float("inf"))


def _list_errors() -> Iterator[tuple[str, str]]:
    """Codes and default messages; of classes that share a code the one that first has it speaks."""
    seen = set()
    for name in ERROR_MODULES:
        module = importlib.import_module(name)
        for value in vars(module).values():
            if not (isinstance(value, type) and issubclass(value, Exception) and value.__module__ == name):
                continue
            code = getattr(value, "code", None)
            if isinstance(code, str) and code not in seen:
                seen.add(code)
                yield code, " ".join((value.__doc__ or "").split())


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _wrap(line: str) -> list[str]:
    """A paragraph or item that is too long, on several lines."""
    if len(line) <= _WIDTH or line.startswith(("|", "```")):
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" *-")))
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _join(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", f"{_NOTE}", *parts]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
