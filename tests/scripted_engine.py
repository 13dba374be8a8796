"""An engine's HTTP face for tests of the gateway: real sockets, real SSE, answers chosen by the words of the prompt.

It speaks the wire of the engine and records what it was told; there is no model behind it. `answer` in the prompt gives
five chunks; the other words are the methods of `Script`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from app_server import running_app

FINGERPRINT = "sha256:" + "f" * 64
NUM_CHUNKS = 5
GOOD_PARITY = {
    "dtype": "float32",
    "num_prompts": 4,
    "num_positions": 100,
    "max_logit_difference": 1e-5,
    "max_kl": 1e-9,
    "base_logit_difference": 1e-5,
    "base_kl": 1e-9,
    "logit_limit": 1e-3,
    "kl_limit": 1e-5,
}
"""What an engine says of an adapter that it serves as its files say."""


class ScriptedEngine:
    """One engine; `url` once it runs."""

    def __init__(self) -> None:
        self.url = ""
        self.fingerprint = FINGERPRINT
        self.own_digest = ""
        self.go_on = asyncio.Event()
        self.calls: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.closed: list[str] = []
        self.sent: dict[str, int] = {}
        self.resident: list[str] = []
        self.state_changes: dict[str, Any] = {}
        self.failed: dict[str, dict[str, Any]] = {}
        self.quarantined: dict[str, dict[str, Any]] = {}
        self.asked_to_load: list[str] = []
        self.asked_to_drop: list[str] = []
        self.asked_to_measure: list[str] = []
        self.parity: tuple[int, dict[str, Any]] = (200, GOOD_PARITY)
        self.may_measure = asyncio.Event()
        self.may_measure.set()
        self.keeps_draining = False
        self.is_faithful = False
        """Whether it holds what it was asked to load, pinned as it was asked to."""
        self.pinned: set[str] = set()
        self.num_slots = 0
        self.refuses_loads = False
        self.known: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.began_at = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/internal/state":
            await _send_json(send, 200, self._state())
        elif path == "/internal/usage":
            await _send_json(send, 200, self._usage())
        elif path.startswith("/internal/adapters/") and scope["method"] == "PUT":
            await self._load_anew(path.split("/")[3], receive, send)
        elif path.startswith("/internal/adapters/") and scope["method"] == "DELETE":
            await self._drop(path.split("/")[3], send)
        elif path.startswith("/internal/parity/"):
            await self._measure(path.split("/")[3], send)
        elif path.startswith("/internal/requests/"):
            await self._serve_request(path, scope["method"], send)
        else:
            await self._serve_call(scope, receive, send)

    def _state(self) -> dict[str, Any]:
        return {
            "is_ready": True,
            "is_draining": False,
            "waiting": 0,
            "running": 0,
            "slots": [
                {"slot": 0, "state": "ready", "digest": digest, "keep": digest in self.pinned}
                for digest in [*self.resident, *[None] * (self.num_slots - len(self.resident))]
            ],
            "model": {"name": "tiny", "fingerprint": FINGERPRINT},
            "failed": self.failed,
            "quarantined": self.quarantined,
            **self.state_changes,
        }

    def _usage(self) -> dict[str, Any]:
        names = ("prompt_tokens", "cached_tokens", "completion_tokens", "load_bytes")
        sums = {name: sum(done[name] for done in self.ended.values()) for name in names}
        num_charged = sum(done["completion_tokens"] > 0 for done in self.ended.values())
        totals = {"process_id": "one", "age_s": time.monotonic() - self.began_at, "requests": num_charged, **sums}
        return {"totals": totals, "finished": list(self.ended.values())}

    def serve_full(self, name: str, digest: str) -> None:
        """Serve a whole model of that name, whose files have this digest."""
        self.own_digest = digest
        self.state_changes["model"] = {"name": name, "fingerprint": "sha256:" + "e" * 64, "digest": digest}

    def serve_weights(self, weights_digest: str) -> None:
        """Have weights of that digest, also when it measures."""
        self.state_changes["model"] = {"name": "tiny", "fingerprint": FINGERPRINT, "weights_digest": weights_digest}
        self.parity = (200, {**self.parity[1], "weights_digest": weights_digest})

    def fail_load(self, digest: str, **changes: Any) -> None:
        """Have given up to load a digest, for a cause in its bytes."""
        self.failed[digest] = {
            "reason": "The adapter's bytes do not match its digest; upload it again.",
            "code": "digest_mismatch",
            "attempts": 5,
            "is_content": True,
            "is_final": True,
            "retry_in_s": None,
            **changes,
        }

    async def _load_anew(self, digest: str, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        if self.refuses_loads:
            await _send_json(send, 503, {"error": {"message": "Every slot is in use.", "code": "adapter_loading"}})
            return
        self.asked_to_load.append(digest)
        if self.is_faithful:
            self.resident = [*{*self.resident, digest}]
            pin = json.loads(body).get("pin", digest in self.pinned)
            self.pinned = self.pinned | {digest} if pin else self.pinned - {digest}
        if json.loads(body).get("forgive", True):
            self.failed.pop(digest, None)
            self.quarantined.pop(digest, None)
        await _send_json(send, 200, {})

    async def _drop(self, digest: str, send: Any) -> None:
        self.asked_to_drop.append(digest)
        if self.keeps_draining:
            await asyncio.sleep(3600)
        if self.is_faithful:
            self.resident = [held for held in self.resident if held != digest]
            self.pinned.discard(digest)
        await _send_json(send, 200, {})

    async def _measure(self, digest: str, send: Any) -> None:
        self.asked_to_measure.append(digest)
        await self.may_measure.wait()
        await _send_json(send, *self.parity)

    async def _serve_request(self, path: str, method: str, send: Any) -> None:
        request_id = path.split("/")[3]
        if method == "POST":
            self.aborted.append(request_id)
        done = self.known.get(request_id) or (
            self.describe_done(request_id, "abort") if request_id in self.sent else None
        )
        if done is None:
            await _send_json(send, 404, {"error": {"message": "unknown", "code": "not_found"}})
        elif method == "POST":
            await _send_json(send, 200, done)
        else:
            await _send_json(send, 200, {"request_id": request_id, "state": "finished", "done": done})

    async def _serve_call(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        fields = json.loads(body)
        self.calls.append({"path": scope["path"], "headers": headers, "body": fields})
        request_id = headers["x-loraplex-request-id"]
        script = Script(self, request_id, fields, receive, send)
        watch = asyncio.create_task(script.watch())
        try:
            await script.run()
        finally:
            watch.cancel()

    def describe_done(self, request_id: str, finish: str, digest: str = "base") -> dict[str, Any]:
        """What the engine says of an ended request, and counts, as it does at the first time."""
        num_tokens = self.sent.get(request_id, 0)
        is_free = num_tokens == 0 and finish in ("error", "abort")
        done = {
            "request_id": request_id,
            "prompt_tokens": 0 if is_free else 7,
            "cached_tokens": 0 if is_free else 2,
            "completion_tokens": num_tokens,
            "queue_s": 0.0,
            "prefill_s": 0.1,
            "load_s": 0.0,
            "decode_s": 0.2,
            "preemptions": 0,
            "finish": finish,
            "digest": digest,
            "load_bytes": 0 if is_free else 64,
        }
        return self.ended.setdefault(request_id, done)


class Script:
    """One answer, by the first word of the prompt."""

    def __init__(
        self, engine: ScriptedEngine, request_id: str, fields: dict[str, Any], receive: Any, send: Any
    ) -> None:
        self.engine = engine
        self.request_id = request_id
        self.fields = fields
        is_adapter = fields["model"].startswith("sha256:") and fields["model"] != engine.own_digest
        self.digest = fields["model"] if is_adapter else "base"
        self.receive = receive
        self.send = send
        self.gone = asyncio.Event()

    async def watch(self) -> None:
        """Note when the gateway closes the connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.engine.closed.append(self.request_id)
        self.gone.set()

    async def run(self) -> None:
        """Answer."""
        word = str(self.fields.get("prompt", "say" if self.find_said() is not None else "answer")).split()[0]
        await getattr(self, f"do_{word}")()

    def find_said(self) -> str | None:
        """What a chat asks to be said: what follows `say ` in its last message."""
        messages = self.fields.get("messages")
        content = messages[-1].get("content") if isinstance(messages, list) and messages else None
        return content.removeprefix("say ") if isinstance(content, str) and content.startswith("say ") else None

    async def do_say(self) -> None:
        """The words after `say`, a chunk of a chat each, and what they cost; `forever` is said until nobody listens."""
        await self.start()
        words = (self.find_said() or "").split(" ")
        while True:
            for word in words:
                self.engine.sent[self.request_id] += 1
                await self.event({"choices": [{"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}]})
                await asyncio.sleep(0.01)
            if words != ["forever"] or self.gone.is_set():
                break
        await self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(words)}})
        await self.end()

    async def event(self, body: dict[str, Any]) -> None:
        """Send one event."""
        data = f"data: {json.dumps(body)}\n\n".encode()
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def do_answer(self) -> None:
        """Five chunks and a good end, or the same as one body."""
        if not self.fields.get("stream"):
            self.engine.sent[self.request_id] = NUM_CHUNKS
            done = self.engine.describe_done(self.request_id, "stop", self.digest)
            await _send_json(
                self.send,
                200,
                {"object": "text_completion", "choices": [{"index": 0, "text": "x" * NUM_CHUNKS}]},
                **{"x-loraplex-digest": self.digest, "x-loraplex-done": json.dumps(done)},
            )
            return
        await self.start()
        for i in range(NUM_CHUNKS):
            await self.chunk(f"t{i}")
        await self.end()

    async def do_echo(self) -> None:
        """`echo COUNT GAP_S WORD`: so many chunks, at this pace, of what only this adapter says to this word.

        That it ended well is remembered, as an engine does.
        """
        _, count, gap_s, word = self.fields["prompt"].split()
        texts = list(echo(self.digest, word, int(count)))
        if self.fields.get("stream"):
            await self.start()
            for text in texts:
                await self.chunk(text)
                await asyncio.sleep(float(gap_s))
            self.engine.known[self.request_id] = self.engine.describe_done(self.request_id, "stop", self.digest)
            await self.end()
            return
        await asyncio.sleep(float(gap_s) * len(texts))
        self.engine.sent[self.request_id] = len(texts)
        done = self.engine.describe_done(self.request_id, "stop", self.digest)
        self.engine.known[self.request_id] = done
        body = {"object": "text_completion", "choices": [{"index": 0, "text": "".join(texts)}]}
        headers = {"x-loraplex-digest": self.digest, "x-loraplex-done": json.dumps(done)}
        await _send_json(self.send, 200, body, **headers)

    async def do_bytewise(self) -> None:
        """A good answer in pieces of one byte, with characters of many bytes."""
        await self.start()
        await self.chunk("Grüße 🙂", pieces=True)
        await self.end()

    async def do_pause(self) -> None:
        """One chunk, then nothing until the test says `go_on`, then a good end."""
        await self.start()
        await self.chunk("a")
        await self.engine.go_on.wait()
        await self.end()

    async def do_slow(self) -> None:
        """A chunk every 20 ms until the gateway goes."""
        await self.start()
        while not self.gone.is_set():
            await self.chunk("t")
            await asyncio.sleep(0.02)

    async def do_flood(self) -> None:
        """Large chunks as fast as they are taken."""
        await self.start()
        while not self.gone.is_set():
            await self.chunk("t" * 65536)
            await asyncio.sleep(0)

    async def do_wait(self) -> None:
        """Nothing at all: the request waits in the queue."""
        self.engine.sent[self.request_id] = 0
        await self.gone.wait()

    async def do_die(self) -> None:
        """Two chunks, half an event, then the connection breaks."""
        await self.start()
        await self.chunk("a")
        await self.chunk("b")
        await self.send({"type": "http.response.body", "body": b'data: {"choices": [{"te', "more_body": True})
        raise RuntimeError("scripted death")

    async def do_cut(self) -> None:
        """Two chunks and an end without [DONE]."""
        await self.start()
        await self.chunk("a")
        await self.chunk("b")
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def do_fail(self) -> None:
        """Two chunks, then the engine's own error event."""
        await self.start()
        await self.chunk("a")
        await self.chunk("b")
        await self.done("error")
        error = {"error": {"message": "bad", "type": "server_error", "param": None, "code": "adapter_output_invalid"}}
        body = f"data: {json.dumps(error)}\n\n".encode()
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def do_refuse(self) -> None:
        """The queue is full; or by more words of the prompt: `refuse STATUS CODE RETRY_AFTER`."""
        status, code, retry_after = self.fields["prompt"].split()[1:] or ("429", "queue_full", "3")
        error = {"message": "full", "type": "rate_limit_error", "param": None, "code": code}
        done = self.engine.describe_done(self.request_id, "error")
        headers = {"retry-after": retry_after, "x-loraplex-done": json.dumps(done)}
        await _send_json(self.send, int(status), {"error": error}, **headers)

    async def do_unknown(self) -> None:
        """The engine does not accept the gateway's token."""
        await _send_json(self.send, 401, {"error": {"message": "no", "code": "invalid_api_key"}})

    async def do_other(self) -> None:
        """An answer for other weights than those asked for."""
        self.digest = "sha256:" + "0" * 64
        await self.do_answer()

    async def start(self) -> None:
        """Send status and headers of a stream."""
        self.engine.sent[self.request_id] = 0
        headers = {"content-type": "text/event-stream; charset=utf-8", "x-loraplex-digest": self.digest}
        await self.send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )

    async def chunk(self, text: str, *, pieces: bool = False) -> None:
        """Send one chunk."""
        self.engine.sent[self.request_id] += 1
        chunk = json.dumps({"choices": [{"index": 0, "text": text}]}, ensure_ascii=False)
        data = f"data: {chunk}\n\n".encode()
        for part in [data[i : i + 1] for i in range(len(data))] if pieces else [data]:
            await self.send({"type": "http.response.body", "body": part, "more_body": True})

    async def done(self, finish: str) -> None:
        """Send the event that says what it cost."""
        event = json.dumps(self.engine.describe_done(self.request_id, finish, self.digest))
        body = f"event: loraplex.done\ndata: {event}\n\n".encode()
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """Send a good end."""
        await self.done("stop")
        await self.send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send_json(send: Any, status: int, body: Any, **headers: str) -> None:
    found = {"content-type": "application/json", **headers}
    pairs = [(name.encode(), value.encode()) for name, value in found.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def echo(digest: str, word: str, count: int) -> Iterator[str]:
    """What the script `echo` says."""
    for index in range(count):
        yield hashlib.sha256(f"{digest} {word} {index}".encode()).hexdigest()[:8]


@asynccontextmanager
async def running_engine() -> AsyncIterator[ScriptedEngine]:
    """Yield a scripted engine that runs."""
    engine = ScriptedEngine()
    async with running_app(engine) as url:
        engine.url = url
        yield engine
