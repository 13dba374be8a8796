"""Addresses in whatever a client may say: nobody goes there, and nobody asks what they mean."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_world import ADMIN_KEY, GatewayWorld, enclosed_world
from loraplex_registry.errors import ArtifactError
from loraplex_registry.wire.client import ArtifactClient

URLS = (
    "http://169.254.169.254/latest/meta-data/",
    "https://evil.example/x",
    "file:///etc/passwd",
    "//evil.example/x",
    "s3://evil/x",
    "gopher://127.0.0.1:6379/_x",
)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        await found.create_tenant("team-x")
        await found.push("team-x")
        yield found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every name that is looked up and every address that is called, which then fails."""
    found: list[object] = []

    def refuse(name: str) -> Callable[..., Any]:
        def call(*args: Any, **_: Any) -> Any:
            found.append((name, args))
            raise OSError("nobody calls out")

        return call

    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse(name))
    monkeypatch.setattr(socket.socket, "connect", refuse("connect"))
    return found


@pytest.mark.parametrize("url", URLS)
async def test_nothing_that_a_client_says_is_called(world: GatewayWorld, asked: list[object], url: str) -> None:
    tenant = "/api/v1/tenants/team-x"
    image = {"type": "image_url", "image_url": {"url": url}}
    file = {"name": url, "size": 1, "sha256": "a" * 64, "part_size": 8 << 20, "part_sha256": ["a" * 64]}
    base = {"name": "b", "fingerprint": url, "modules": {}, "vocab_size": 1, "accepted_names": [url]}
    pool = {"pool": url, "digest": "sha256:" + "a" * 64}
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/v1/chat/completions", CHAT | {"metadata": {"callback": url}, "user": url}),
        ("POST", "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [image]}]}),
        ("POST", "/v1/chat/completions", CHAT | {"model": url}),
        ("POST", "/v1/completions", {"model": url, "prompt": url}),
        ("POST", "/api/v1/plan", {"model": url, "gpu": "24GiB"}),
        ("POST", "/api/v1/plan", {"model": "x", "gpu": url, "config": {"architectures": [url], "_name_or_path": url}}),
        ("POST", "/api/v1/tenants", {"name": "team-y", "display_name": url}),
        ("POST", f"{tenant}/keys", {"name": url, "owner": url}),
        ("POST", "/api/v1/bases", base),
        ("POST", f"{tenant}/adapters/default/uploads", {"files": [file]}),
        ("POST", f"/api/v1/escalations/esc_{'a' * 26}/register", pool),
        ("PUT", f"{tenant}/adapters/default/aliases/live", {"targets": [{"version": 1, "weight": 100}], "url": url}),
    ]
    headers = dict.fromkeys(("x-forwarded-host", "forwarded", "referer", "origin", "x-callback-url"), url)
    for method, path, body in calls:
        response = await world.call(method, path, json=body, headers=headers | {"if-match": "*"})
        assert response.status_code != 500, (path, response.text)
    assert asked == []


@pytest.mark.parametrize("url", URLS)
async def test_nothing_that_an_adapter_says_is_called_or_opened(
    world: GatewayWorld, asked: list[object], url: str
) -> None:
    changed = []
    for part, (name, content) in world.last_files():
        if name == "adapter_config.json":
            fields = {"base_model_name_or_path": url, "revision": url, "auto_mapping": {"parent_library": url}}
            content = json.dumps(json.loads(content) | fields).encode()
        changed.append((part, (name, content)))
    changed.append(("files", ("tokenizer_config.json", json.dumps({"tokenizer_file": url}).encode())))
    response = await world.call("POST", "/api/v1/tenants/team-x/adapters/other/versions", files=changed)
    assert response.status_code == 422, response.text
    assert "root:" not in response.text
    assert asked == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_registry_that_sends_elsewhere_is_not_followed(status: int) -> None:
    called: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        called.append(str(request.url))
        return httpx.Response(status, headers={"location": "http://169.254.169.254/"})

    client = ArtifactClient("http://registry", "key", transport=httpx.MockTransport(answer))
    with pytest.raises(ArtifactError):
        client.manifest("sha256:" + "a" * 64)
    assert called == [f"http://registry/internal/artifacts/sha256:{'a' * 64}/manifest"]
    assert ADMIN_KEY not in called[0]
