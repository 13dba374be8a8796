"""A small server that speaks as much of the Hugging Face hub's protocol as a download needs, on the loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


@dataclass
class HubState:
    """The files of one repository and the faults to play."""

    repo_id: str
    folder: Path
    stall_after: int | None = None
    """Bytes of the next large file after which nothing more comes, once."""
    stalled: threading.Event = field(default_factory=threading.Event)
    """Set when that happened."""
    wrong_byte: bool = False
    """Deliver large files with one byte changed."""
    requests: list[str] = field(default_factory=list)
    """Method, path and range of every request."""


class _Handler(BaseHTTPRequestHandler):
    state: HubState

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _answer(self, *, with_body: bool) -> None:
        self.state.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        resolve = f"/{self.state.repo_id}/resolve/{COMMIT}/"
        model = f"/api/models/{self.state.repo_id}"
        path = self.path.split("?")[0]
        if path in {model, f"{model}/revision/main"}:
            self._send_json(self._info(), with_body=with_body)
        elif path == f"{model}/tree/{COMMIT}":
            self._send_json([_tree_entry(item) for item in self._siblings()], with_body=with_body)
        elif self.path.startswith(resolve):
            self._send_file(self.state.folder / self.path.removeprefix(resolve), with_body=with_body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)

    def _info(self) -> dict[str, object]:
        return {"id": self.state.repo_id, "sha": COMMIT, "siblings": self._siblings()}

    def _siblings(self) -> list[dict[str, object]]:
        return [_sibling(path) for path in sorted(self.state.folder.iterdir()) if path.is_file()]

    def _send_json(self, content: object, *, with_body: bool) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, with_body=with_body)

    def _send_file(self, path: Path, *, with_body: bool) -> None:
        data = path.read_bytes()
        headers = {"ETag": f'"{_sibling(path)["blobId"]}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.state.wrong_byte and path.suffix == ".safetensors":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if given := self.headers.get("Range"):
            start = int(given.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], headers, with_body=with_body)
        else:
            self._send(200, data, headers, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self._send_body(body)

    def _send_body(self, body: bytes) -> None:
        limit = self.state.stall_after
        if limit is None or len(body) <= limit:
            self.wfile.write(body)
            return
        self.state.stall_after = None
        self.wfile.write(body[:limit])
        self.wfile.flush()
        self.state.stalled.set()
        # until the client is gone
        self.connection.recv(1)


def _sibling(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    item: dict[str, object] = {
        "rfilename": path.name,
        "size": len(data),
        "blobId": hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest(),
    }
    if path.suffix == ".safetensors":
        item["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return item


def _tree_entry(sibling: dict[str, object]) -> dict[str, object]:
    entry = {"type": "file", "path": sibling["rfilename"], "size": sibling["size"], "oid": sibling["blobId"]}
    return {**entry, "lfs": {**sibling["lfs"], "oid": sibling["lfs"]["sha256"]}} if "lfs" in sibling else entry  # type: ignore[dict-item,index]


@contextmanager
def running_hub(state: HubState) -> Iterator[str]:
    """Serve `state`; yields the address."""
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
