"""Who opens connections, and who says where to: operators, by settings and command lines. No request of a client does.

A module that begins to call out must be named here with the source of its addresses.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("platform", "engine", "adapters_registry")
LIBRARIES = {
    *("aiohttp", "boto3", "ftplib", "grpc", "http.client", "httpx", "huggingface_hub", "paramiko", "redis", "requests"),
    *("smtplib", "urllib.request", "urllib3", "websockets", "xmlrpc", "zmq"),
}
CALLS = {
    *("create_connection", "create_datagram_endpoint", "getaddrinfo", "gethostbyname", "open_connection"),
    *("sock_connect", "urlopen"),
}
OPENERS = {
    "loraplex.bench": "the command line of who measures",
    "loraplex.cli.plan_model": "the command line: a model on the hub",
    "loraplex.cli.status": "LORAPLEX_URL",
    "loraplex.client": "LORAPLEX_URL, and signed addresses of the registry there",
    "loraplex.db.epoch_bus": "LORAPLEX_REDIS_URL",
    "loraplex.db.redis_client": "LORAPLEX_REDIS_URL",
    "loraplex.doctor": "the settings that it judges",
    "loraplex.fleet.discovery": "LORAPLEX_POOLS",
    "loraplex.gateway.tries": "LORAPLEX_REDIS_URL",
    "loraplex.quotas.redis_meter": "LORAPLEX_REDIS_URL",
    "loraplex.supervisor": "its own children, on loopback",
    "loraplex_engine.bases.hub": "`loraplex base pull`",
    "loraplex_engine.loop.core": "a Unix socket of its parent",
    "loraplex_engine.server.core_process": "a Unix socket in a private folder",
    "loraplex_engine.wire": "whoever makes an `EngineClient`",
    "loraplex_registry.storage": "LORAPLEX_OBJECT_STORE_URL",
    "loraplex_registry.wire.client": "whoever makes an `ArtifactClient`",
}
"""Modules or packages that open connections, and where their addresses come from."""
MAKERS = {
    "EngineClient": {"loraplex.fleet.fleet"},
    "ArtifactClient": {f"loraplex_engine.{name}" for name in ("lora.worker", "parity.worker", "server.adapter_file")},
    "S3Bucket": {"loraplex_registry.storage.s3", "loraplex_registry.storage.probe"},
}
"""Clients that take an address, and who makes them: of pools, of the registry's URL, of the object store's."""


def _read_modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(ROOT / root).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for root in SOURCE_ROOTS
        for path in sorted((ROOT / root).rglob("*.py"))
    }


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return _read_modules()


def _find_ways_out(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            found.add(node.func.attr)
        found |= {library for library in LIBRARIES for name in names if f"{name}.".startswith(f"{library}.")}
    return found


def _is_opener(module: str) -> bool:
    return any(f"{module}.".startswith(f"{opener}.") for opener in OPENERS)


def test_every_module_that_calls_out_is_named_with_the_source_of_its_addresses(modules: dict[str, ast.Module]) -> None:
    unnamed = {name: ways for name, tree in modules.items() if (ways := _find_ways_out(tree)) and not _is_opener(name)}
    # its exceptions alone
    unnamed.pop("loraplex_registry.storage.s3_failure", None)
    assert unnamed == {}


def test_every_name_here_calls_out(modules: dict[str, ast.Module]) -> None:
    used = {
        opener
        for opener in OPENERS
        for name, tree in modules.items()
        if f"{name}.".startswith(f"{opener}.") and _find_ways_out(tree)
    }
    assert used == OPENERS.keys()


def test_a_way_out_is_found() -> None:
    for text in (
        "import httpx",
        "from redis.asyncio import Redis",
        "import urllib.request",
        "loop.getaddrinfo('x', 1)",
    ):
        assert _find_ways_out(ast.parse(text)), text
    assert not _find_ways_out(ast.parse("from urllib.parse import urlsplit"))


@pytest.mark.parametrize("client", MAKERS)
def test_clients_that_take_an_address_are_made_in_one_place(modules: dict[str, ast.Module], client: str) -> None:
    makers = {
        name
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == client
    }
    assert makers - {name for name in makers if name.startswith("loraplex.doctor.")} == MAKERS[client]


def test_no_redirect_is_followed(modules: dict[str, ast.Module]) -> None:
    following = [
        f"{name}:{node.lineno}"
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in ("follow_redirects", "allow_redirects")
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    ]
    assert following == []
