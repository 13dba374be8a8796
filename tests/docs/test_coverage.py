"""What a user can meet has a word in the docs: settings, error codes, metrics, commands. And the docs invent none."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cyclopts import App

from loraplex.cli.app import build_app
from loraplex.fleet.view import FleetView
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.gateway.problem import CODE_TO_STATUS
from loraplex_engine.metrics import EngineMetrics, EngineSnapshot
from loraplex_engine.server.metric import FrontMetrics
from loraplex_registry.api.metric import RegistryMetrics
from loraplex_registry.wire.setting import SETTINGS, Setting

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
ERROR_MODULES = (
    "loraplex.errors",
    "loraplex.client.errors",
    "loraplex.bench.errors",
    "loraplex_engine.errors",
    "loraplex_registry.errors",
    "loraplex_registry.peft.errors",
)
TEST_SETTINGS = {"LORAPLEX_TEST_PG", "LORAPLEX_TEST_REQUIRE", "LORAPLEX_TEST_CASES", "LORAPLEX_TEST_LONG"}


def _page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("setting", [one for one in SETTINGS if one.is_built], ids=lambda one: one.name)
def test_setting_has_a_row_with_its_default(setting: Setting) -> None:
    row = re.search(rf"^\| `{setting.name}` \|.*$", _page("settings.md"), re.MULTILINE)
    assert row, f"add {setting.name} to docs/settings.md"
    assert setting.default is None or f"`{setting.default}`" in row[0]


def test_docs_name_no_setting_that_does_not_exist() -> None:
    known = {setting.name for setting in SETTINGS} | TEST_SETTINGS
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"\bLORAPLEX_[A-Z][A-Z_]*[A-Z]\b(?!\*)", page.read_text(encoding="utf-8"))
        if name.removesuffix("_FILE") not in known
    }
    assert named == set()


def _codes(module: ModuleType) -> Iterator[str]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__:
            code = getattr(value, "code", None)
            if isinstance(code, str):
                yield code


def _known_codes() -> set[str]:
    return {code for name in ERROR_MODULES for code in _codes(importlib.import_module(name))}


def test_every_error_code_has_a_heading_and_no_heading_lacks_a_code() -> None:
    headings = set(re.findall(r"^### `([a-z_]+)`$", _page("errors.md"), re.MULTILINE))
    assert headings == _known_codes() | set(CODE_TO_STATUS)


def test_documented_statuses_are_those_that_the_gateway_answers() -> None:
    documented = dict(re.findall(r"^### `([a-z_]+)`\n\n\*\*(\d+)\.\*\*", _page("errors.md"), re.MULTILINE))
    answered = {code: str(status) for code, status in CODE_TO_STATUS.items()}
    assert {code: documented.get(code) for code in answered} == answered


def _scrapes() -> dict[str, bytes]:
    """What each process answers to a scrape, as text."""
    engine, gateway, front = EngineMetrics(), GatewayMetrics(), FrontMetrics()
    engine.watch(lambda: EngineSnapshot(0.0, *[0] * 15, *[{}] * 5))
    return {
        "core": engine.to_text(),
        "gateway": gateway.render(FleetView()),
        "front": front.render(),
        "registry": RegistryMetrics().render(),
    }


@pytest.mark.parametrize("process", ["core", "gateway", "front", "registry"])
def test_every_metric_is_documented(process: str) -> None:
    documented = set(re.findall(r"^\| `(loraplex_[a-z_]+)` \|", _page("metrics.md"), re.MULTILINE))
    exported = set(re.findall(r"^# TYPE (loraplex_[a-z_]+) ", _scrapes()[process].decode(), re.MULTILINE))
    assert {name for name in exported if not name.endswith("_created")} - documented == set()


def _commands(command: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that does something, as its words."""
    children = {name: child for name, child in command.resolved_commands().items() if not name.startswith("-")}
    if command.default_command is not None and path:
        yield path
    for name, child in children.items():
        yield from _commands(child, (*path, name))


COMMANDS = sorted(set(_commands(build_app())))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_is_documented(words: tuple[str, ...]) -> None:
    assert f"loraplex {' '.join(words)}" in _page("cli.md")


def test_docs_show_no_command_that_does_not_exist() -> None:
    shown = {
        (page.name, *words)
        for page in PAGES
        for block in re.findall(r"^```.*?^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for words in re.findall(r"^(?:\$ )?loraplex ([a-z]+)(?: ([a-z]+))?", block, re.MULTILINE)
    }
    unknown = {words for words in shown if (words[1],) not in COMMANDS and words[1:] not in COMMANDS}
    assert unknown == set()


GROUPS = {words[0] for words in COMMANDS}


def _is_command(words: list[str]) -> bool:
    is_whole = len(words) < 2 or (words[0],) in COMMANDS or tuple(words) in COMMANDS
    return not words or (words[0] in GROUPS and is_whole)


def _texts(source: str) -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / source).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file.name, node.value


def _spoken() -> Iterator[tuple[str, str]]:
    """What pages, templates, scripts and texts of the programs say behind `loraplex `, as a reader would type it."""
    shown = (file for file in (ROOT / "platform/loraplex/dashboard").rglob("*.*") if file.suffix in (".html", ".js"))
    texts = [(file.name, file.read_text(encoding="utf-8")) for file in sorted(shown)]
    for source in ("platform/loraplex", "engine/loraplex_engine", "adapters_registry/loraplex_registry"):
        texts += _texts(source)
    for where, text in texts:
        for command in re.findall(r"(?<![\w/.-])loraplex (?!command\b)([a-z][^<`\n]*)", text):
            yield where, command
    for page in PAGES:
        for command in re.findall(r"`loraplex ([^`]+)`", page.read_text(encoding="utf-8")):
            yield page.name, command


def test_nothing_that_is_said_names_a_command_that_does_not_exist() -> None:
    spoken = list(_spoken())
    assert len(spoken) > 100
    found = [(where, text, re.match(r"([a-z]+)?(?: ([a-z]+)(?![\w./@-]))?", text)) for where, text in spoken]
    unknown = [
        (where, text) for where, text, match in found if match and not _is_command([*filter(None, match.groups())])
    ]
    assert unknown == []


@pytest.mark.parametrize("part", ["platform/loraplex", "engine/loraplex_engine", "adapters_registry/loraplex_registry"])
def test_every_package_is_on_the_structure_page(part: str) -> None:
    _, section = _page("structure.md").split(f"`{part}`\n", 1)
    named = set(re.findall(r"`([a-z_]+)`", section.split("\n#", 1)[0]))
    children = {path.stem for path in (ROOT / part).iterdir() if not path.name.startswith(("_", "."))}
    assert children - named - {"version"} == set()
