"""A real core process as its front sees it, and just enough of a registry to feed its loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import zmq

from loraplex_engine.config import CoreLaunch, EngineConfig
from loraplex_engine.wire import messages as wire

KEY = "engine-key"


def share_native(cache_dir: Path) -> str:
    """Make a cache folder that has only the machine's compiled ops, which take a core half a minute to build."""
    machine = Path(os.environ.get("LORAPLEX_CACHE_DIR") or Path.home() / ".cache" / "loraplex") / "native"
    machine.mkdir(parents=True, exist_ok=True)
    cache_dir.mkdir()
    (cache_dir / "native").symlink_to(machine)
    return str(cache_dir)


class ArtifactServer:
    """Just enough of a registry: artifacts by digest, behind the engine's key; can be told to be down."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.is_down = False
        self.stalled = ""
        self.resume = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = server.find(self.path) if self.headers["Authorization"] == f"Bearer {KEY}" else None
                self.send_response(503 if server.is_down else 200 if body is not None else 404)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def find(self, path: str) -> bytes | None:
        if self.is_down:
            return None
        _, _, _, digest, *rest = path.split("/")
        if digest == self.stalled:
            self.resume.wait(30)
        folder = self.folders.get(digest)
        if folder is None:
            return None
        if rest == ["manifest"]:
            files = [{"name": f.name, "size": f.stat().st_size, "sha256": ""} for f in folder.iterdir()]
            return json.dumps({"digest": digest, "base_fingerprint": "", "files": files, "config": {}}).encode()
        return (folder / rest[1]).read_bytes()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class Core:
    """A core process and the front's ends of its sockets."""

    def __init__(self, config: EngineConfig, folder: Path, engine_key: str = KEY) -> None:
        self._context = zmq.Context()
        self._to_core, self._to_front = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        endpoints = [f"ipc://{folder}/in", f"ipc://{folder}/out"]
        self._to_core.bind(endpoints[0])
        self._to_front.bind(endpoints[1])
        launch = CoreLaunch(config, *endpoints, engine_key=engine_key)
        self.process = subprocess.Popen([sys.executable, "-m", "loraplex_engine", "core"], stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(launch))
        self.process.stdin.close()
        self._calls = 0

    def send(self, message: wire.ToCore) -> None:
        self._to_core.send(wire.encode(message))

    def try_receive(self, timeout_s: float) -> wire.ToFront | None:
        """What the core says next, its beats apart; None if that is nothing for so long."""
        deadline = time.monotonic() + timeout_s
        while self._to_front.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            message = wire.decode_to_front(self._to_front.recv())
            if not isinstance(message, wire.Beat):
                return message
        return None

    def receive(self, timeout_s: float = 60.0) -> wire.ToFront:
        message = self.try_receive(timeout_s)
        assert message is not None, "the core says nothing"
        return message

    def wait_ready(self) -> wire.CoreReady | wire.CoreFailed:
        while True:
            message = self.receive(120)
            if isinstance(message, wire.CoreReady | wire.CoreFailed):
                return message

    def call(self, message_type: Any, **fields: Any) -> wire.Reply:
        self._calls += 1
        self.send(message_type(call_id=self._calls, **fields))
        while True:
            message = self.receive()
            if isinstance(message, wire.Reply):
                assert message.call_id == self._calls
                return message

    def collect(self, *request_ids: str) -> dict[str, list[wire.TokenEvent]]:
        events: dict[str, list[wire.TokenEvent]] = {request_id: [] for request_id in request_ids}
        while not all(found and found[-1].finish for found in events.values()):
            message = self.receive()
            assert isinstance(message, wire.TokenEvents)
            for event in message.events:
                events[event.request_id].append(event)
        return events

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._to_core.close(linger=0)
        self._to_front.close(linger=0)
        self._context.term()
