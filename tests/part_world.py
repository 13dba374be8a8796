"""Uploads in parts as tests send them: cut, announced, sent to where the answer says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from registry_world import Caller

PART_BYTES = 8 << 20


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def cut(content: bytes, part_size: int = PART_BYTES) -> list[bytes]:
    return [content[start : start + part_size] for start in range(0, len(content), part_size)]


def announce(files: Mapping[str, bytes], part_size: int = PART_BYTES) -> dict[str, Any]:
    """The body of `POST .../uploads`."""
    return {
        "files": [
            {
                "name": name,
                "size": len(content),
                "sha256": sha256(content),
                "part_size": part_size,
                "part_sha256": [sha256(part) for part in cut(content, part_size)],
            }
            for name, content in files.items()
        ]
    }


def missing(view: Mapping[str, Any], files: Mapping[str, bytes]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Every part that has not arrived, with its bytes."""
    for part in view["parts"]:
        if not part["received"]:
            yield part, cut(files[part["file"]])[part["number"]]


async def send(team: Caller, part: Mapping[str, Any], content: bytes, **changes: str) -> httpx.Response:
    """Send one part: to the registry with the caller's key, to a store without it."""
    headers = {**part["headers"], **changes}
    address = urlsplit(part["url"])
    if address.path.startswith("/api/v1/"):
        return await team(part["method"], address.path, content=content, headers=headers)
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.request(part["method"], part["url"], content=content, headers=headers)


async def begin(team: Caller, path: str, files: Mapping[str, bytes], **kwargs: Any) -> dict[str, Any]:
    """Announce an upload and send all its parts."""
    answer = await team("POST", f"{path}/uploads", json=announce(files), **kwargs)
    assert answer.status_code == 201, answer.text
    view: dict[str, Any] = answer.json()
    for part, content in missing(view, files):
        sent = await send(team, part, content)
        assert sent.status_code in (200, 204), sent.text
    return view


async def upload(team: Caller, path: str, files: Mapping[str, bytes], **kwargs: Any) -> httpx.Response:
    """Upload a folder the large way."""
    view = await begin(team, path, files, **kwargs)
    return await team("POST", f"{path}/uploads/{view['id']}/complete")
