"""Servers for tests of `loraplex doctor`, each with a fault to plant: an engine, an S3 server, a Postgres that refuses.

They serve in threads, as doctor asks from threads; nothing here knows what doctor does with the answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from loraplex.cli.doctor import open_door
from loraplex.doctor.examination import admit
from loraplex.doctor.finding import Finding
from loraplex.doctor.patient import Patient
from loraplex_registry.wire.identity import TokenError, TokenSigner, TokenVerifier, generate_signing_key
from scripted_engine import FINGERPRINT

SIGNING_KEY = generate_signing_key()
WEIGHTS = f"sha256:{'a' * 64}"


def see(environ: Mapping[str, str], part: str = "gateway", limit_s: float = 5.0, **options: Any) -> Patient:
    """The patient with these settings alone."""
    return admit({"HOME": "/nowhere", **environ}, open_door(), limit_s, part, **options)


def look(find: Callable[..., Iterator[Finding]], patient: Patient, *more: Any) -> dict[str, Finding]:
    """What one check finds, by its name: the worst of each."""
    order = ("ok", "skip", "warn", "fail")
    found = [patient.hide(one) for one in find(patient, *more)]
    return {one.check: one for one in sorted(found, key=lambda one: order.index(one.verdict))}


def verdicts(found: Mapping[str, Finding]) -> dict[str, str]:
    """The verdicts alone."""
    return {name: one.verdict for name, one in found.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    skew_s = 0.0

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate((timestamp or time.time()) + self.skew_s, usegmt=True)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))


@contextmanager
def _serving(handler: type[_Handler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


@dataclass
class PlantedEngine:
    """An engine's state, behind a real verifier of tokens; also what a registry says to an engine."""

    url: str = ""
    fingerprint: str = FINGERPRINT
    weights_digest: str = WEIGHTS
    trusts: bytes = field(default_factory=lambda: TokenSigner(SIGNING_KEY).public_pem)
    skew_s: float = 0.0
    ops: str = "native"
    engine_key: str = ""


@contextmanager
def planted_engine(**faults: Any) -> Iterator[PlantedEngine]:
    """Yield an engine that serves `tiny`."""
    engine = PlantedEngine(**faults)
    verifier = TokenVerifier([engine.trusts], "engine")

    class Handler(_Handler):
        skew_s = engine.skew_s

        def do_GET(self) -> None:
            bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
            if self.path == "/healthz":
                self.answer(200, b'{"status":"alive"}')
            elif self.path.startswith("/internal/artifacts/"):
                self.answer(404 if bearer == engine.engine_key else 401, b"{}")
            else:
                self._answer_state(bearer)

        def _answer_state(self, bearer: str) -> None:
            try:
                verifier.verify(bearer)
            except TokenError:
                self.answer(401, b"{}")
                return
            model = {
                "name": "tiny",
                "fingerprint": engine.fingerprint,
                "weights_digest": engine.weights_digest,
                "ops": engine.ops,
                "ops_reason": "no g++ found",
            }
            state = {"is_ready": True, "is_draining": False, "slots": [], "model": model}
            self.answer(200, json.dumps(state).encode(), **{"content-type": "application/json"})

    with _serving(Handler) as engine.url:
        yield engine


@dataclass
class S3Faults:
    """What an S3 server does wrong; `refuses` is the code of its refusals."""

    ignores_conditions: bool = False
    ignores_checksums: bool = False
    skew_s: float = 0.0
    hangs: bool = False
    refuses: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    go_on: threading.Event = field(default_factory=threading.Event)


class _S3Handler(_Handler):
    """The few requests that there are."""

    faults: S3Faults

    def do_PUT(self) -> None:
        body, key, faults = self.read(), urlsplit(self.path).path, self.faults
        sent = self.headers.get("x-amz-checksum-sha256")
        is_other = sent is not None and sent != base64.b64encode(hashlib.sha256(body).digest()).decode()
        if is_other and not faults.ignores_checksums:
            self._refuse(400, "BadDigest")
        elif self.headers.get("if-none-match") == "*" and key in faults.objects and not faults.ignores_conditions:
            self._refuse(412, "PreconditionFailed")
        else:
            faults.objects[key] = body
            self.answer(200, b"", etag='"1"')

    def do_GET(self) -> None:
        place, faults = urlsplit(self.path), self.faults
        if faults.hangs:
            faults.go_on.wait(60)
        if faults.refuses:
            self._refuse(403, faults.refuses)
        elif "list-type" in parse_qs(place.query):
            keys = "".join(
                f"<Contents><Key>{key.split('/', 2)[2]}</Key><Size>{len(body)}</Size>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key, body in faults.objects.items()
            )
            self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>".encode())
        elif place.path in faults.objects:
            self.answer(200, faults.objects[place.path], etag='"1"')
        else:
            self._refuse(404, "NoSuchKey")

    def do_POST(self) -> None:
        self.read()
        self.faults.objects.clear()
        self.answer(200, b"<DeleteResult></DeleteResult>")

    def _refuse(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())


@contextmanager
def planted_s3(**faults: Any) -> Iterator[str]:
    """Yield a LORAPLEX_OBJECT_STORE_URL of a server with these faults."""
    planted = S3Faults(**faults)
    with _serving(type("Handler", (_S3Handler,), {"faults": planted, "skew_s": planted.skew_s})) as endpoint:
        try:
            yield f"s3://bucket/prefix?endpoint={endpoint}&region=us-east-1&path_style=1"
        finally:
            planted.go_on.set()


@contextmanager
def silent_server() -> Iterator[int]:
    """Yield a port that takes connections and never says anything, as behind a broken load balancer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def refusing_postgres() -> Iterator[int]:
    """Yield the port of a Postgres to which every password is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_refuse_all, args=(server,), daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def _refuse_all(server: socket.socket) -> None:
    fields = b"SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user\0\0"
    refusal = b"E" + (len(fields) + 4).to_bytes(4, "big") + fields
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        with client:
            while first := client.recv(8192):
                if first[4:8] in ((80877103).to_bytes(4, "big"), (80877104).to_bytes(4, "big")):
                    # neither TLS nor GSS
                    client.sendall(b"N")
                elif first[:1] == b"p":
                    client.sendall(refusal)
                    break
                else:
                    # a password in clear is wanted
                    client.sendall(b"R\0\0\0\x08\0\0\0\x03")


def write_folder(folder: Path, **keys: str) -> Path:
    """Make a data folder with these files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in keys.items():
        file = folder / name.replace("_", ".")
        file.write_text(text)
        file.chmod(0o600)
    return folder
