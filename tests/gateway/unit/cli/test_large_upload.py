"""Uploads in parts from the client's side, against a platform in memory that cuts, loses, refuses and forgets."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.client import large_upload, part_sender, retrying
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError, ConnectionFailedError
from loraplex.client.large_upload import LargeUpload, send_in_parts
from loraplex.client.location import Location
from loraplex.client.part_plan import hash_part, plan_file
from loraplex.client.upload import Upload
from loraplex.client.upload_memory import UploadMemory

GATEWAY, STORE = "http://gateway:8080", "https://store.example"
PART = 1000
VERSION = {
    "tenant": "team-x",
    "adapter": "bot",
    "version": 3,
    "kind": "lora",
    "digest": "sha256:" + "a" * 64,
    "state": "ready",
    "promoted": True,
    "base_model": "tiny",
    "rank": 8,
    "target_modules": ["q_proj"],
    "num_parameters": 1,
    "size_bytes": 1,
    "created_at": "2026-01-01T00:00:00Z",
    "created_by": "ada",
    "report": {"verdict": "pass", "checks": []},
}


def refuse(status: int, code: str, param: str | None = None, **more: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": code, "code": code, "param": param}, **more})


class Platform:
    """A gateway and a store; `faults` are taken one a part, and what they do is their name."""

    def __init__(self, *, by_gateway: bool = False) -> None:
        self.by_gateway = by_gateway
        self.uploads: dict[str, dict[str, Any]] = {}
        self.bytes: dict[tuple[str, str, int], bytes] = {}
        self.faults: list[str] = []
        self.calls: list[str] = []
        self.keys: dict[str, str] = {}
        self.store_headers: list[httpx.Headers] = []
        self.completions: list[httpx.Response | Exception] = []
        self.starts: list[httpx.Response | Exception] = []
        self.serial = 0
        self._lock = threading.Lock()

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer for the gateway."""
        body = request.read()
        with self._lock:
            path = request.url.path.removeprefix("/api/v1/tenants/team-x/adapters/bot/uploads")
            self.calls.append(f"{request.method} {path}")
            assert request.headers["authorization"] == "Bearer lpx_key"
            if request.method == "PUT":
                return self._take(request, body)
            if not path:
                return self._start(request, json.loads(body))
            name, _, verb = path[1:].partition("/")
            if name not in self.uploads:
                return refuse(404, "not_found")
            if verb == "complete":
                return self._complete(name)
            if request.method == "DELETE":
                del self.uploads[name]
                return httpx.Response(204)
            return httpx.Response(200, json=self._show(name))

    def store(self, request: httpx.Request) -> httpx.Response:
        """Answer for the object store."""
        assert "authorization" not in request.headers
        body = request.read()
        with self._lock:
            self.store_headers.append(request.headers)
            return self._take(request, body)

    def _start(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        planned = self.starts.pop(0) if self.starts else None
        if isinstance(planned, Exception):
            raise planned
        if planned is not None:
            return planned
        key = request.headers["idempotency-key"]
        if key not in self.keys:
            self.keys[key] = f"upl_{len(self.uploads)}"
            self.uploads[self.keys[key]] = {"files": body["files"], "state": "open"}
        return httpx.Response(201, json=self._show(self.keys[key]))

    def _show(self, name: str) -> dict[str, Any]:
        self.serial += 1
        parts = []
        for file in self.uploads[name]["files"]:
            for number, digest in enumerate(file["part_sha256"]):
                is_there = (name, file["name"], number) in self.bytes
                place = f"{name}/files/{file['name']}/parts/{number}"
                url = f"{STORE}/{place}?serial={self.serial}"
                if self.by_gateway:
                    url = f"{GATEWAY}/api/v1/tenants/team-x/adapters/bot/uploads/{place}?serial={self.serial}"
                size = min(file["part_size"], file["size"] - number * file["part_size"])
                how = {
                    "url": url,
                    "method": "PUT",
                    "headers": {"x-amz-checksum-sha256": base64.b64encode(bytes.fromhex(digest)).decode()},
                    "expires_at": (datetime.now(UTC) + timedelta(hours=1)).isoformat(),
                }
                part = {"file": file["name"], "number": number, "size": size, "sha256": digest, "received": is_there}
                parts.append(part | (dict.fromkeys(how) if is_there else how))
        files = [{key: file[key] for key in ("name", "size", "sha256")} for file in self.uploads[name]["files"]]
        sizes = {"size_bytes": sum(part["size"] for part in parts)}
        sizes["received_bytes"] = sum(part["size"] for part in parts if part["received"])
        return {
            "id": name,
            "state": self.uploads[name]["state"],
            "expires_at": "",
            "files": files,
            "parts": parts,
        } | sizes

    def _take(self, request: httpx.Request, body: bytes) -> httpx.Response:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "cut":
            raise httpx.WriteError("broken pipe", request=request)
        if fault == "away":
            return refuse(503, "unavailable")
        if fault == "expired":
            return httpx.Response(403, text="<Error><Code>AccessDenied</Code><Message>Request has expired</Message>")
        if fault == "moved":
            return httpx.Response(307, headers={"location": "https://elsewhere.example/"})
        if fault == "spoilt":
            return httpx.Response(400, text="<Error><Code>BadDigest</Code></Error>")
        found = base64.b64encode(hashlib.sha256(body).digest()).decode()
        if found != request.headers["x-amz-checksum-sha256"]:
            return httpx.Response(400, text="<Error><Code>BadDigest</Code></Error>")
        assert request.headers["content-length"] == str(len(body))
        *_, name, _, file, _, number = request.url.path.split("/")
        self.bytes[name, file, int(number)] = body
        if fault == "lost answer":
            raise httpx.ReadError("reset", request=request)
        return httpx.Response(204)

    def _complete(self, name: str) -> httpx.Response:
        planned = self.completions.pop(0) if self.completions else None
        if isinstance(planned, Exception):
            raise planned
        if planned is not None:
            return planned
        for file in self.uploads[name]["files"]:
            parts = [self.bytes.get((name, file["name"], number)) for number in range(len(file["part_sha256"]))]
            if None in parts:
                return refuse(409, "conflict", "parts")
            assert hashlib.sha256(b"".join(part or b"" for part in parts)).hexdigest() == file["sha256"]
        self.uploads[name]["state"] = "completed"
        return httpx.Response(201, json=VERSION)


class Watch:
    """Counts what a terminal would show; `limit` bytes sent are as Ctrl-C is."""

    def __init__(self, limit: int | None = None) -> None:
        self.hashed, self.sent, self.resumed, self.is_sending = 0, 0, 0, False
        self.limit = limit

    def hashing(self, total: int) -> None:
        self.total = total

    def sending(self, upload: str, total: int, received: int) -> None:
        assert total == self.total
        self.is_sending, self.sent, self.resumed = True, received, received

    def judging(self) -> None:
        self.is_judging = True

    def advance(self, count: int) -> None:
        if not self.is_sending:
            self.hashed += count
            return
        self.sent += count
        if self.limit is not None and self.sent >= self.limit:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    def pauses(num_tries: int = retrying.NUM_TRIES) -> Iterator[float]:
        return iter([0.0] * (num_tries - 1))

    monkeypatch.setattr(large_upload, "iterate_pauses", pauses)
    monkeypatch.setattr(part_sender, "iterate_pauses", pauses)
    monkeypatch.setattr("time.sleep", lambda _: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "adapter"
    place.mkdir()
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 30)
    (place / "README.md").write_bytes(b"")
    return place


Push = Callable[..., Upload]


@pytest.fixture
def push(folder: Path, tmp_path: Path) -> Push:
    def run(platform: Platform, watch: Watch | None = None, **changes: Any) -> Upload:
        fields: dict[str, Any] = {"part_size": PART, "store_transport": httpx.MockTransport(platform.store)} | changes
        order = LargeUpload("team-x", "bot", sorted(folder.iterdir()), **fields)
        with Connection(Location(GATEWAY, "lpx_key"), httpx.MockTransport(platform.answer)) as connection:
            return send_in_parts(connection, order, UploadMemory(tmp_path / "cache"), watch or Watch())

    return run


@pytest.mark.parametrize("by_gateway", [False, True])
def test_parts_arrive_and_make_a_version(push: Push, by_gateway: bool) -> None:
    platform, watch = Platform(by_gateway=by_gateway), Watch()
    upload = push(platform, watch)
    assert (upload.version.version, upload.is_new) == (3, True)
    assert watch.hashed == watch.sent == 256 * 30 + 2
    assert len(platform.bytes) == 9


@pytest.mark.parametrize("fault", ["cut", "away", "expired", "spoilt", "lost answer"])
def test_part_that_fails_is_sent_again(push: Push, fault: str) -> None:
    platform, watch = Platform(), Watch()
    platform.faults = [fault] * 2
    assert push(platform, watch).is_new
    assert watch.sent == 256 * 30 + 2


def test_store_never_gets_the_key_and_leads_nowhere_else(push: Push) -> None:
    platform = Platform()
    platform.faults = ["moved"]
    with pytest.raises(ClientError, match="elsewhere"):
        push(platform)
    # `Platform.store` asserts that no key came; the redirect was not followed, as nobody answers there


def test_address_of_a_part_at_another_host_gets_no_key_even_with_a_path_of_the_api(push: Push) -> None:
    platform = Platform(by_gateway=True)
    show = platform._show

    def lure(name: str) -> dict[str, Any]:
        shown = show(name)
        for part in shown["parts"]:
            part["url"] = part["url"] and part["url"].replace(GATEWAY, "http://gateway.example:8080")
        return shown

    platform._show = lure  # type: ignore[method-assign]
    push(platform)
    assert len(platform.store_headers) == 9


def wait_until_quiet(platform: Platform) -> None:
    """Parts that were on their way when a push was cut arrive."""
    num_seen = -1
    while num_seen != len(platform.store_headers):
        num_seen = len(platform.store_headers)
        time.sleep(0.1)


def test_cut_upload_goes_on_where_it_was(push: Push) -> None:
    platform, watch = Platform(), Watch(limit=4 * PART)
    with pytest.raises(KeyboardInterrupt):
        push(platform, watch)
    wait_until_quiet(platform)
    num_there = sum(map(len, platform.bytes.values()))
    assert 0 < num_there < 256 * 30
    num_taken = len(platform.store_headers)
    again = Watch()
    push(platform, again)
    assert again.resumed >= num_there
    assert len(platform.store_headers) - num_taken <= 9 - num_there // PART
    assert [call for call in platform.calls if call == "POST "] == ["POST "]


def test_begun_upload_is_not_gone_on_with_when_told_so_or_when_anything_differs(push: Push, folder: Path) -> None:
    platform = Platform()
    with pytest.raises(KeyboardInterrupt):
        push(platform, Watch(limit=2 * PART))
    assert push(platform, resumes=False).is_new
    assert "DELETE /upl_0" in platform.calls
    with pytest.raises(KeyboardInterrupt):
        push(platform, Watch(limit=2 * PART))
    (folder / "adapter_config.json").write_text("[]")
    watch = Watch()
    push(platform, watch)
    assert watch.resumed == 0


def test_upload_that_the_platform_forgot_begins_anew(push: Push) -> None:
    platform = Platform()
    with pytest.raises(KeyboardInterrupt):
        push(platform, Watch(limit=2 * PART))
    platform.uploads.clear()
    platform.bytes.clear()
    assert push(platform).is_new


def test_lost_answers_of_start_and_complete_are_asked_for_again(push: Push) -> None:
    platform = Platform()
    request = httpx.Request("POST", GATEWAY)
    platform.completions = [httpx.ReadError("reset", request=request), refuse(503, "store_unavailable")]
    assert push(platform).is_new
    assert platform.calls.count("POST /upl_0/complete") == 3


def test_key_that_a_dead_platform_holds_is_waited_for(push: Push) -> None:
    platform = Platform()
    platform.starts = [httpx.ReadError("reset"), *[refuse(409, "conflict") for _ in range(20)]]
    assert push(platform).is_new
    assert platform.starts == []
    platform = Platform()
    platform.starts = [refuse(409, "conflict")]
    with pytest.raises(ClientError) as caught:
        push(platform)
    assert caught.value.status == 409


def test_another_run_that_completes_is_waited_for(push: Push) -> None:
    platform = Platform()
    with pytest.raises(KeyboardInterrupt):
        push(platform, Watch(limit=2 * PART))
    platform.uploads["upl_0"]["state"] = "completing"
    platform.completions = [*[refuse(409, "conflict")] * 3, httpx.Response(201, json=VERSION)]
    assert push(platform).is_new
    assert not [call for call in platform.calls if call == "POST /upl_1"]


def test_parts_that_the_store_lost_are_sent_again(push: Push) -> None:
    platform = Platform()
    complete = platform._complete

    def lose(name: str) -> httpx.Response:
        platform.bytes.pop(("upl_0", "adapter_model.safetensors", 3))
        platform._complete = complete  # type: ignore[method-assign]
        return complete(name)

    platform._complete = lose  # type: ignore[method-assign]
    assert push(platform).is_new


def test_quota_and_refusal_are_told_at_once(push: Push) -> None:
    platform = Platform()
    platform.completions = [refuse(429, "quota_exceeded", "adapter_bytes")]
    with pytest.raises(ClientError, match="quota_exceeded"):
        push(platform)
    report = {"verdict": "fail", "checks": [{"name": "shape", "verdict": "fail", "message": "no", "subject": "q"}]}
    platform.completions = [refuse(422, "adapter_rejected", "q", report=report)]
    watch = Watch()
    with pytest.raises(ClientError) as caught:
        push(platform, watch)
    assert caught.value.report is not None
    assert watch.resumed == 256 * 30 + 2, "what waited for its quota was still there"
    push(platform, watch := Watch())
    assert watch.resumed == 0, "what was refused is not gone on with"


def test_store_that_stays_away_ends_the_upload_and_a_later_run_goes_on(push: Push) -> None:
    platform = Platform()
    platform.faults = ["", "", *["cut"] * 100]
    with pytest.raises(ConnectionFailedError, match=r"store\.example"):
        push(platform)
    platform.faults = []
    watch = Watch()
    push(platform, watch)
    assert watch.resumed > 0


def test_file_that_changes_meanwhile_is_named(push: Push, folder: Path) -> None:
    platform = Platform()
    weights = folder / "adapter_model.safetensors"

    class Writer(Watch):
        def sending(self, upload: str, total: int, received: int) -> None:
            super().sending(upload, total, received)
            weights.write_bytes(bytes(256 * 30))

    with pytest.raises(ClientError, match="changed while it was sent"):
        push(platform, Writer())


def test_expired_addresses_are_renewed_before_they_are_used(push: Push) -> None:
    platform = Platform()
    show = platform._show

    def age(name: str) -> dict[str, Any]:
        shown = show(name)
        if platform.serial == 1:
            for part in shown["parts"]:
                part["expires_at"] = "2020-01-01T00:00:00Z"
        return shown

    platform._show = age  # type: ignore[method-assign]
    assert push(platform).is_new
    assert 1 <= platform.calls.count("GET /upl_0") <= 3


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faults=st.lists(st.sampled_from(["", "", "cut", "away", "spoilt", "expired", "lost answer"]), max_size=30),
    cuts=st.lists(st.integers(0, 8000), max_size=4),
)
def test_whatever_fails_between_the_whole_arrives_once(push: Push, faults: list[str], cuts: list[int]) -> None:
    platform = Platform()
    platform.faults = faults
    for limit in [*cuts, None, None, None, None]:
        watch = Watch(limit)
        try:
            upload = push(platform, watch)
        except (KeyboardInterrupt, ClientError):
            continue
        assert upload.is_new
        assert watch.sent == watch.total
        return
    assert platform.faults == [], "only faults stand between an upload and its end"


def test_plan_names_every_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content in (b"", b"x", b"x" * PART, b"x" * (PART + 1)):
        path.write_bytes(content)
        plan = plan_file(path, lambda _: None, PART)
        parts = [content[i : i + PART] for i in range(0, len(content), PART)]
        assert plan.part_sha256 == tuple(hashlib.sha256(part).hexdigest() for part in parts)
        assert (plan.size, plan.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert all(hash_part(path, i * PART, PART) == plan.part_sha256[i] for i in range(len(parts)))


def test_memory_forgets_what_is_old_and_survives_what_it_cannot_read(tmp_path: Path) -> None:
    import os

    memory = UploadMemory(tmp_path)
    memory.keep("a" * 64, "upl_1")
    assert memory.find("a" * 64) == "upl_1"
    assert (tmp_path / "uploads" / ("a" * 64)).stat().st_mode & 0o077 == 0
    os.utime(tmp_path / "uploads" / ("a" * 64), (0, 0))
    memory.keep("b" * 64, "upl_2")
    assert memory.find("a" * 64) is None
    (tmp_path / "uploads" / ("b" * 64)).write_bytes(b"\xff{")
    assert memory.find("b" * 64) is None
    (tmp_path / "file").write_text("")
    UploadMemory(tmp_path / "file").keep("c" * 64, "upl_3")
