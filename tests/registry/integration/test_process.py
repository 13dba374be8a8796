"""The registry as a process of its own: exit codes, a real socket, and the client that engines use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplex_registry.app import upgrade
from loraplex_registry.wire.client import ArtifactClient, ArtifactError, ArtifactMissingError
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from registry_process import build_environ, running_registry, start_process
from registry_world import ENGINE_KEY, Caller, World, build_tiny_spec, read_folder
from support import free_port

A = "/api/v1/tenants/team-a/adapters/style"


@pytest.fixture
def signer() -> TokenSigner:
    return TokenSigner(generate_signing_key())


@pytest.fixture
def url(tmp_path: Path, signer: TokenSigner) -> Iterator[str]:
    """The address of a running registry process."""
    with running_registry(tmp_path, signer) as (address, _):
        yield address


async def _upload(url: str, signer: TokenSigner, folder: Path) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        world = World(http, None, signer, folder)  # type: ignore[arg-type]
        admin: Caller = world.caller(None, role="admin")
        await admin("POST", "/api/v1/bases", content=msgspec.json.encode(build_tiny_spec()))
        answer = await world.caller().upload(A, folder)
        assert answer.status_code == 201, answer.text
        body: dict[str, Any] = answer.json()
        return body


async def test_engine_fetches_what_a_team_uploaded(
    url: str, signer: TokenSigner, make_adapter: Any, tmp_path: Path
) -> None:
    folder = make_adapter(1)
    digest = (await _upload(url, signer, folder))["digest"]
    client = ArtifactClient(url, ENGINE_KEY)
    manifest = client.manifest(digest)
    for file in manifest.files:
        target = tmp_path / file.name
        assert client.fetch_file(digest, file.name, target) == file.size
        assert target.read_bytes() == read_folder(folder)[file.name]
    with pytest.raises(ArtifactMissingError):
        client.manifest("sha256:" + "0" * 64)
    with pytest.raises(ArtifactMissingError):
        client.fetch_file(digest, "README.md", tmp_path / "x")
    client.close()
    wrong = ArtifactClient(url, "wrong")
    with pytest.raises(ArtifactError, match="401"):
        wrong.manifest(digest)
    wrong.close()


async def test_metrics_are_for_whoever_may_read_them(
    url: str, signer: TokenSigner, make_adapter: Any, tmp_path: Path
) -> None:
    folder = make_adapter(1)
    await _upload(url, signer, folder)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        world = World(http, None, signer, folder)  # type: ignore[arg-type]
        refused = await world.caller().upload(A, {"evil.bin": b"x"})
        assert refused.status_code == 422
        assert (await http.get("/metrics")).status_code == 401
        assert (await world.caller()("GET", "/metrics")).status_code == 403
        answer = await world.caller(None, role="admin_readonly")("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    size = sum(path.stat().st_size for path in folder.iterdir())
    for line in (
        'loraplex_uploads_total{result="created"} 1.0',
        'loraplex_uploads_total{result="refused"} 1.0',
        'loraplex_upload_refusals_total{check="pickle"} 1.0',
        f"loraplex_upload_bytes_total {float(size)}",
    ):
        assert line in answer.text.splitlines(), answer.text


async def test_body_of_a_refused_upload_does_not_break_the_connection(url: str, signer: TokenSigner) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        team = World(http, None, signer, Path()).caller()  # type: ignore[arg-type]
        refused = await team.upload(A, {"evil.bin": b"x" * (32 << 20)})
        assert refused.status_code in (409, 422)
        assert (await team("GET", A)).status_code == 404


def test_database_without_tables_ends_with_3_and_the_command(tmp_path: Path, signer: TokenSigner) -> None:
    process = start_process(build_environ(tmp_path, signer, 1))
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 3
    assert b"loraplex db upgrade" in complaint


def test_bad_setting_ends_with_2_and_its_name(tmp_path: Path, signer: TokenSigner) -> None:
    for environ in (
        build_environ(tmp_path, signer, 1, LORAPLEX_OBJECT_STORE_URL="s3://bucket?colour=red"),
        build_environ(tmp_path, signer, 1, LORAPLEX_ENGINE_KEYS="x"),
    ):
        upgrade(f"sqlite+aiosqlite:///{tmp_path}/data/loraplex.db")
        process = start_process(environ)
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == 2
        assert b"LORAPLEX_" in complaint


def test_client_tries_again_when_a_connection_breaks(tmp_path: Path) -> None:
    answers = iter([httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200, content=b"bytes")])

    def answer(request: httpx.Request) -> httpx.Response:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    client = ArtifactClient("http://registry", "key", transport=httpx.MockTransport(answer))
    assert client.fetch_file("sha256:" + "0" * 64, "adapter_config.json", tmp_path / "file") == 5
    assert (tmp_path / "file").read_bytes() == b"bytes"
    client.close()


def test_engine_key_goes_to_no_proxy_of_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    client = ArtifactClient(url, ENGINE_KEY)
    with pytest.raises(ArtifactMissingError):
        client.manifest("sha256:" + "0" * 64)
    client.close()


def test_client_follows_no_redirect(tmp_path: Path) -> None:
    moved = httpx.MockTransport(lambda request: httpx.Response(307, headers={"Location": "http://elsewhere/x"}))
    client = ArtifactClient("http://registry", "key", transport=moved)
    with pytest.raises(ArtifactError, match="307"):
        client.fetch_file("sha256:" + "0" * 64, "adapter_config.json", tmp_path / "file")
    client.close()


async def test_a_file_that_rotted_breaks_the_connection_before_its_end(
    url: str, signer: TokenSigner, make_adapter: Any, tmp_path: Path
) -> None:
    folder = make_adapter(1)
    (folder / "README.md").write_bytes(b"# Model\n" * (3 << 17))
    await _upload(url, signer, folder)
    (stored,) = (tmp_path / "data" / "objects").glob("sha256/*/*/*/files/README.md")
    stored.write_bytes(b"$" + stored.read_bytes()[1:])
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        team = World(http, None, signer, folder).caller()  # type: ignore[arg-type]
        with pytest.raises(httpx.RemoteProtocolError):
            await team("GET", f"{A}/versions/1/files/README.md")
        assert (await team("GET", f"{A}/versions/1/files/adapter_config.json")).status_code == 200
        (stored.parent / "adapter_config.json").write_bytes(b"{}")
        damaged = await team("GET", f"{A}/versions/1/files/adapter_config.json")
        assert (damaged.status_code, damaged.json()["error"]["code"]) == (503, "store_unavailable")
