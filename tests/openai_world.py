"""The OpenAI surface through each of its doors: route, streamed or not, base or adapter, at the engine or the gateway.

A `Door` sends the same request whichever it is, so a case is written once and holds for all sixteen.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from case_world import Cases
from loraplex.client.upload import list_files
from loraplex_registry.wire.identity import Identity, TokenSigner
from openai_answer import PATHS, Answer, Endpoint, read_answer
from platforms import LivePlatform, running_platform

BASE = "tiny-cases"
ADAPTER = "team/f01"
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Door:
    """One way to ask."""

    endpoint: Endpoint
    is_stream: bool
    has_adapter: bool
    is_gateway: bool

    def __str__(self) -> str:
        return "-".join(
            [
                self.endpoint,
                "streamed" if self.is_stream else "whole",
                "adapter" if self.has_adapter else "base",
                "gateway" if self.is_gateway else "engine",
            ]
        )


ALL_DOORS = [
    Door(endpoint, *kind) for endpoint in ("chat", "completions") for kind in itertools.product((False, True), repeat=3)
]
# each value of each part of a door once with each route
SOME_DOORS = [
    door
    for door in ALL_DOORS
    if (door.is_stream, door.has_adapter, door.is_gateway) in ((True, True, True), (False, False, False))
]


class OpenAIWorld:
    """A platform with a tenant `team` and its adapter `f01`; asks through any door."""

    def __init__(self, platform: LivePlatform, cases: Cases) -> None:
        self.platform, self.cases = platform, cases
        with platform.management() as client:
            client.create_tenant("team")
            scopes = ["infer", "adapters:read", "adapters:write", "usage:read"]
            self.key = client.create_key("team", "openai", scopes=scopes).key or ""
            (engine,) = client.list_fleet()
        self.digest = self.push("f01", cases.folders["F01"])
        self.http = httpx.Client(timeout=60, trust_env=False)
        self.engine_url = engine.url
        self._signer = TokenSigner((platform.data_dir / "signing.pem").read_bytes())

    def push(self, adapter: str, folder: Path, **params: Any) -> str:
        """Upload a folder and return its digest."""
        with self.platform.management(self.key) as client:
            return client.push("team", adapter, list_files(folder), lambda _: None, **params).digest

    def sign(self) -> str:
        """A key's token as the gateway sends it to an engine, good for a minute."""
        identity = Identity(
            role="tenant",
            tenant_id="t-openai",
            tenant="team",
            scopes=("infer",),
            key_id="key_openai",
            actor="test",
            request_id="req_openai",
        )
        return self._signer.sign(identity, "engine")

    def post(self, door: Door, body: dict[str, Any] | bytes, path: str | None = None) -> httpx.Response:
        """Send a body as it is."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        bearer = self.key if door.is_gateway else self.sign()
        url = (self.platform.url if door.is_gateway else self.engine_url) + (path or PATHS[door.endpoint])
        headers = {"authorization": f"Bearer {bearer}", "content-type": "application/json"}
        return self.http.post(url, content=content, headers=headers)

    def model(self, door: Door) -> str:
        """What the door calls the model."""
        if not door.has_adapter:
            return BASE
        return ADAPTER if door.is_gateway else self.digest

    def body(self, door: Door, prompt: str = "Where is my parcel?", **fields: Any) -> dict[str, Any]:
        """A request for a few tokens; None leaves a field out."""
        kind: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]} if door.endpoint == "chat" else {"prompt": prompt}
        )
        plain = {"model": self.model(door), "temperature": 0, "max_tokens": 12, **kind}
        stream = {"stream": True, "stream_options": {"include_usage": True}} if door.is_stream else {}
        return {name: value for name, value in (plain | stream | fields).items() if value is not None}

    def ask(self, door: Door, prompt: str = "Where is my parcel?", **fields: Any) -> Answer:
        """Ask for a few tokens and read the answer to its end."""
        return self.send(door, self.body(door, prompt, **fields))

    def send(self, door: Door, body: dict[str, Any] | bytes) -> Answer:
        """Send a body as it is and read the answer to its end."""
        response = self.post(door, body)
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        return read_answer(door.endpoint, response.status_code, response.content, is_stream=is_stream)

    def refusal(self, door: Door, param: str | None, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """Send a body that must be refused with 400 and this `param`; return the error."""
        answer = self.send(door, body)
        assert answer.status == 400, (answer.status, answer.error, str(body)[:200])
        assert answer.error is not None
        assert answer.error.keys() == {"message", "type", "param", "code"}
        assert (answer.error["param"], answer.error["type"]) == (param, "invalid_request_error"), answer.error
        return answer.error

    def count_tokens(self, door: Door, **fields: Any) -> int:
        """What `/v1/tokenize` counts."""
        response = self.post(door, {"model": self.model(door), **fields}, "/v1/tokenize")
        assert response.status_code == 200, response.text
        return int(response.json()["count"])


@contextmanager
def running_openai_world(cases: Cases, data_dir: Path) -> Iterator[OpenAIWorld]:
    """Start a platform on the tiny base; at the end everything must have been given back."""
    flags = ["--base", str(cases.base), "--dtype", "float32", "--max-loras", "2", "--cpu-threads", "1"]
    with running_platform(data_dir, *flags) as platform:
        world = OpenAIWorld(platform, cases)
        try:
            yield world
            world.platform.wait_idle()
        finally:
            world.http.close()
