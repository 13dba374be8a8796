"""Uploads of any size take the same memory: a registry process is watched while large bodies come in, both ways."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from part_world import announce
from registry_process import running_registry
from registry_world import World, build_tiny_spec, read_folder

A = "/api/v1/tenants/team-a/adapters/style"
_PART = b"x" * (64 << 20)
_MAX_GROWTH_BYTES = 48 << 20


def read_peak_bytes(pid: int) -> int:
    """The most memory that a process has had, as the kernel counts it."""
    status = Path(f"/proc/{pid}/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) << 10


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[httpx.Client, int]]:
    """A client of a team, and the process id; the base is there and one upload has been taken."""
    signer = TokenSigner(generate_signing_key())
    with running_registry(tmp_path, signer) as (url, pid):
        world = World(None, None, signer, Path())  # type: ignore[arg-type]
        admin = world.caller(None, role="admin").headers
        answer = httpx.post(f"{url}/api/v1/bases", content=msgspec.json.encode(build_tiny_spec()), headers=admin)
        assert answer.status_code == 201, answer.text
        with httpx.Client(base_url=url, headers=world.caller().headers, timeout=300) as team:
            yield team, pid


def send_small(team: httpx.Client, path: str, files: dict[str, bytes]) -> None:
    parts = [("files", (name, content)) for name, content in files.items()]
    assert team.post(f"{path}/versions", files=parts).status_code == 201


def announce_large(files: dict[str, bytes], size: int) -> dict[str, Any]:
    """The folder with a file of `size` bytes that all parts of are the same."""
    num_parts, whole = size // len(_PART), hashlib.sha256()
    for _ in range(num_parts):
        whole.update(_PART)
    large = {
        "name": "tokenizer.json",
        "size": size,
        "sha256": whole.hexdigest(),
        "part_size": len(_PART),
        "part_sha256": [hashlib.sha256(_PART).hexdigest()] * num_parts,
    }
    return {"files": [*announce(files)["files"], large]}


@pytest.mark.endure
def test_parts_of_two_gigabytes_take_no_more_memory_than_one_part(
    registry: tuple[httpx.Client, int], make_adapter: Any, long: Callable[[float, float], float]
) -> None:
    team, pid = registry
    files = read_folder(make_adapter(1))
    send_small(team, A, read_folder(make_adapter(2)))
    before = read_peak_bytes(pid)
    view = team.post(f"{A}/uploads", json=announce_large(files, int(long(2, 32)) * len(_PART))).json()
    for part in view["parts"]:
        content = files.get(part["file"], _PART)
        assert team.put(part["url"], content=content, headers=part["headers"]).status_code == 204
    answer = team.post(f"{A}/uploads/{view['id']}/complete", params={"wait": "600"})
    assert answer.status_code == 201, answer.text
    growth = read_peak_bytes(pid) - before
    assert growth < _MAX_GROWTH_BYTES, f"{growth >> 20} MiB"
    read = 0
    with team.stream("GET", f"{A}/versions/2/files/tokenizer.json") as download:
        read = sum(len(chunk) for chunk in download.iter_bytes())
    assert read == view["size_bytes"] - sum(len(content) for content in files.values())
    assert read_peak_bytes(pid) - before < _MAX_GROWTH_BYTES


@pytest.mark.endure
def test_one_body_is_never_held_in_memory(
    registry: tuple[httpx.Client, int], make_adapter: Any, long: Callable[[float, float], float]
) -> None:
    team, pid = registry
    files = read_folder(make_adapter(1))
    send_small(team, A, read_folder(make_adapter(2)))
    before = read_peak_bytes(pid)

    def body() -> Iterator[bytes]:
        for name, content in files.items():
            yield _head(name) + content
        yield _head("tokenizer.json")
        for _ in range(int(long(1, 7))):
            yield _PART
        yield b"\r\n--b--\r\n"

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = team.post(f"{A}/versions", content=body(), headers=headers)
    assert answer.status_code == 201, answer.text
    growth = read_peak_bytes(pid) - before
    assert growth < _MAX_GROWTH_BYTES, f"{growth >> 20} MiB"


def _head(name: str) -> bytes:
    disposition = f'Content-Disposition: form-data; name="files"; filename={json.dumps(name)}'
    return f"\r\n--b\r\n{disposition}\r\n\r\n".encode()
