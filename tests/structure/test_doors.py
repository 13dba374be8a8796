"""The doors between the parts: who may import whom, and what an import may drag along."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"loraplex": "platform", "loraplex_engine": "engine", "loraplex_registry": "adapters_registry"}
DOORS = {
    "loraplex": ("loraplex_engine.wire", "loraplex_registry.wire", "loraplex_registry.peft", "loraplex_registry.http"),
    "loraplex_engine": ("loraplex_registry.wire", "loraplex_registry.peft", "loraplex_registry.http"),
    "loraplex_registry": (),
}
# The one composition root that may hold the registry as a library, and the commands that migrate, compare or examine.
COMPOSITION = {
    (module, "loraplex_registry.app")
    for module in (
        "loraplex.app",
        "loraplex.cli.backup",
        "loraplex.cli.config",
        "loraplex.cli.doctor",
        "loraplex.backup.create",
        "loraplex.backup.verify",
        "loraplex.backup.restore",
    )
}
# each start of a platform waits for this command, and for what it imports
COMPOSITION.add(("loraplex.cli.db", "loraplex_registry.db.migration"))
HEAVY = ("torch", "transformers", "peft", "triton", "safetensors")
SERVER_SIDE = ("sqlalchemy", "litestar", "alembic", "uvicorn")


def _modules(package: str) -> list[str]:
    """Every module below a dotted package or module name."""
    root = ROOT / PARTS[package.split(".", maxsplit=1)[0]]
    place = root.joinpath(*package.split("."))
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return [".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files]


def _imports(module: str) -> Iterator[str]:
    place = (ROOT / PARTS[module.split(".", maxsplit=1)[0]]).joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_allowed(part: str, module: str, imported: str) -> bool:
    other = imported.split(".", maxsplit=1)[0]
    if other not in PARTS or other == part:
        return True
    if any(module == here and f"{imported}.".startswith(f"{there}.") for here, there in COMPOSITION):
        return True
    return any(f"{imported}.".startswith(f"{door}.") for door in DOORS[part])


@pytest.mark.parametrize("part", PARTS)
def test_part_enters_the_others_only_by_their_doors(part: str) -> None:
    crossings = [
        f"{module} imports {imported}"
        for module in _modules(part)
        for imported in _imports(module)
        if not _is_allowed(part, module, imported)
    ]
    assert crossings == []


@pytest.mark.parametrize(
    ("packages", "banned"),
    [
        (("loraplex_registry.wire", "loraplex_engine.wire"), (*HEAVY, *SERVER_SIDE)),
        (("loraplex_registry.peft",), (*HEAVY, *SERVER_SIDE, "httpx")),
        (("loraplex_registry.http",), (*HEAVY, "sqlalchemy", "litestar", "alembic", "httpx")),
        (
            (
                "loraplex_engine.scheduling",
                "loraplex_engine.slots",
                "loraplex_engine.kv.pool",
                "loraplex_engine.kv.reservation",
                "loraplex_engine.core",
                "loraplex_engine.metrics",
                "loraplex_engine.lora.residency",
                "loraplex_engine.loop.core",
                "loraplex_engine.server",
            ),
            HEAVY,
        ),
        # these import what the rows above do
        (("loraplex_registry", "loraplex"), (*HEAVY, "tokenizers", "zmq")),
    ],
)
def test_import_drags_nothing_heavy_along(
    packages: tuple[str, ...], banned: tuple[str, ...], run_python: Callable[[str], str]
) -> None:
    names = [name for package in packages for name in _modules(package) if not name.endswith("__main__")]
    program = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    if found := [one for one in {banned} if one in sys.modules]:
        sys.exit(print(name, "brings", found))"""
    assert run_python(program) == ""


def test_control_plane_installs_without_torch_or_tokenizers() -> None:
    seen: set[str] = set()
    waiting = [("loraplex", frozenset({""}))]
    while waiting:
        name, extras = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [(child.name.lower(), frozenset(child.extras or {""})) for child in _required(name, extras)]
    assert {"litestar", "sqlalchemy", "greenlet"} <= seen
    assert seen.isdisjoint({"torch", "transformers", "peft", "safetensors", "tokenizers", "triton", "pyzmq", "gguf"})


def _required(name: str, extras: frozenset[str]) -> list[Requirement]:
    requirements = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    return [
        child
        for child in requirements
        if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras)
    ]
