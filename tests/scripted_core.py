"""A core without a model: speaks the real messages over real sockets and says what a test tells it to.

`ScriptedCore.answer` is the text of every answer, token by token; `pace_s` the time between tokens. What the front
sent is kept in `added` and `aborted`.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import zmq
import zmq.asyncio

from loraplex_engine.server.core_client import CoreClient
from loraplex_engine.server.core_process import CoreLink
from loraplex_engine.server.front import Front
from loraplex_engine.server.process import build_server
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.wire import messages as wire
from loraplex_registry.wire.identity import Identity, TokenSigner, TokenVerifier, generate_signing_key

DIGEST = "sha256:" + "ab" * 32
BASE = "tiny"
SIGNER = TokenSigner(generate_signing_key())


def build_facts(**changes: Any) -> wire.CoreReady:
    facts: dict[str, Any] = {
        "name": BASE,
        "fingerprint": "f",
        "weights_digest": "sha256:" + "cd" * 32,
        "max_model_len": 256,
        "vocab_size": 2000,
        "eos_token_ids": [2],
        "num_layers": 2,
        "linears_per_layer": 4,
        "dtype": "float32",
        "device": "cpu",
        "row_invariant": True,
        "max_loras": 8,
        "max_lora_rank": 64,
        "num_blocks": 64,
        "block_size": 16,
    }
    return wire.CoreReady(**facts | changes)


def build_logprobs(num_top: int | None, token: int, count: int) -> list[wire.TokenLogprobs]:
    """What a core says of one token: the chosen one is the second likeliest."""
    if num_top is None:
        return []
    likely = [(5, -0.25), (token, -1.0 - count), *((100 + index, -30.0 - index) for index in range(num_top))]
    return [wire.TokenLogprobs(-1.0 - count, likely[:num_top])]


def build_prompt_logprobs(num_top: int | None, ids: list[int]) -> wire.PromptScores:
    """What a core says of a prompt: of all its tokens but the first."""
    pairs = enumerate(ids[1:])
    found = [told for count, token in pairs for told in build_logprobs(num_top, token, count)]
    values = array("f", [value for told in found for value in (told.logprob, *(value for _, value in told.top))])
    top_ids = array("i", [token for told in found for token, _ in told.top])
    return wire.PromptScores(num_top or 0, values.tobytes(), top_ids.tobytes())


class ScriptedCore:
    """One peer of a front; every behaviour is an attribute."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.encode = encode
        self.facts = build_facts()
        self.answer: str | list[int] = "hello world"
        self.pace_s = 0.0
        self.hangs_after: int | None = None
        self.compiles_s = 0.0
        self.errors: dict[int, wire.ErrorInfo] = {}
        self.cached_tokens = 0
        self.replies: dict[str, dict[str, Any] | bytes | wire.ErrorInfo] = {"metrics": b"core_metric 1\n"}
        self.mute: set[str] = set()
        """Tags of calls that get no answer."""
        self.added: list[wire.AddRequest] = []
        self.aborted: list[tuple[str, str]] = []
        self.calls: list[Any] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._drains: list[int] = []
        self._out: Any = None

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def run(self, to_core: str, to_front: str) -> None:
        context = zmq.asyncio.Context()
        inbox, self._out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        inbox.connect(to_core)
        self._out.connect(to_front)
        try:
            await self.say(self.facts)
            while True:
                await self._hear(wire.decode_to_core(await inbox.recv()))
        finally:
            for task in self._tasks.values():
                task.cancel()
            context.destroy(linger=0)

    async def say(self, message: wire.ToFront) -> None:
        await self._out.send(wire.encode(message))

    async def _hear(self, message: wire.ToCore) -> None:
        match message:
            case wire.AddRequest():
                self.added.append(message)
                self._tasks[message.request_id] = asyncio.create_task(self._generate(message))
            case wire.AbortRequest(request_id=request_id, reason=reason):
                self.aborted.append((request_id, reason))
                task = self._tasks.pop(request_id, None)
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    await self._end(request_id, reason, task.stats)
            case wire.Drain(call_id=call_id):
                self._drains.append(call_id)
                await self._settle_drains()
            case _:
                await self._reply(message)

    async def _reply(self, message: Any) -> None:
        self.calls.append(message)
        if isinstance(message, wire.CancelParity) or message.__struct_config__.tag in self.mute:
            return
        body = self.replies.get(message.__struct_config__.tag, {})
        if isinstance(body, wire.ErrorInfo):
            await self.say(wire.Reply(message.call_id, error=body))
        else:
            await self.say(wire.Reply(message.call_id, body))

    async def _generate(self, request: wire.AddRequest) -> None:
        task = asyncio.current_task()
        if self.compiles_s:
            await self.say(wire.Beat(patience_s=600))
            await asyncio.sleep(self.compiles_s)
        ids = self.encode(self.answer) if isinstance(self.answer, str) else self.answer
        for count, token in enumerate(ids[: request.params.max_tokens]):
            task.stats = self._stats(request, count)
            if count in self.errors:
                await self._fail(request, self.errors[count], count)
                return
            if count == self.hangs_after:
                await asyncio.sleep(3600)
            await asyncio.sleep(self.pace_s)
            await self._token(request, token, count)
        is_long = len(ids) >= request.params.max_tokens
        self._tasks.pop(request.request_id, None)
        # the EOS token is counted and has no text
        num_tokens = request.params.max_tokens if is_long else len(ids) + 1
        is_unscored = num_tokens == 0 or not ids
        scores = build_prompt_logprobs(request.params.prompt_logprobs, request.prompt_ids) if is_unscored else None
        await self._end(request.request_id, "length" if is_long else "stop", self._stats(request, num_tokens), scores)
        await self._settle_drains()

    async def _token(self, request: wire.AddRequest, token: int, count: int) -> None:
        logprobs = build_logprobs(request.params.logprobs, token, count)
        scores = wire.NO_SCORES if count else build_prompt_logprobs(request.params.prompt_logprobs, request.prompt_ids)
        event = wire.TokenEvent(request.request_id, [token], logprobs=logprobs, prompt_logprobs=scores)
        await self.say(wire.TokenEvents([event]))

    async def _end(
        self, request_id: str, finish: str, stats: wire.RequestStats, scores: wire.PromptScores | None = None
    ) -> None:
        event = wire.TokenEvent(request_id, [], finish, None, stats, prompt_logprobs=scores or wire.NO_SCORES)
        await self.say(wire.TokenEvents([event]))

    async def _fail(self, request: wire.AddRequest, error: wire.ErrorInfo, count: int) -> None:
        self._tasks.pop(request.request_id, None)
        event = wire.TokenEvent(request.request_id, [], "error", error, self._stats(request, count))
        await self.say(wire.TokenEvents([event]))

    async def _settle_drains(self) -> None:
        if not self._tasks:
            for call_id in self._drains:
                await self.say(wire.Reply(call_id, {"drained": True}))
            self._drains.clear()

    def _stats(self, request: wire.AddRequest, num_tokens: int) -> wire.RequestStats:
        return wire.RequestStats(
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=num_tokens,
            queue_s=0.25,
            prefill_s=0.5 if num_tokens else 0.0,
            load_s=0.0,
            decode_s=0.1 * num_tokens,
            preemptions=1,
        )


def sign(**changes: Any) -> str:
    claims: dict[str, Any] = {
        "role": "tenant",
        "tenant_id": "t-1",
        "tenant": "acme",
        "scopes": ("infer",),
        "key_id": "key_1",
        "actor": "app",
        "request_id": "req_token",
    }
    audience = changes.pop("audience", "engine")
    return SIGNER.sign(Identity(**claims | changes), audience)


class Rig:
    """A front over HTTP on a Unix socket, with a scripted core behind it."""

    def __init__(
        self, front: Front, core: ScriptedCore, client: CoreClient, http: httpx.AsyncClient, server: uvicorn.Server
    ) -> None:
        self.front, self.core, self.client, self.http, self.server = front, core, client, http, server
        self.uds = str(server.config.uds)
        self.core_task: asyncio.Task[None] | None = None

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        if isinstance(body, bytes):
            names["content-type"] = "application/json"
        return await self.http.post(path, headers=names, **content)

    async def kill_core(self) -> None:
        assert self.core_task is not None
        self.core_task.cancel()
        await asyncio.gather(self.core_task, return_exceptions=True)
        self.client.detach()


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        # polling keeps the conditions plain expressions over real state
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_heard(rig: Rig, num_tokens: int) -> None:
    """Wait until the front has so many tokens of what is open."""
    await until(lambda: sum(one.done().completion_tokens for one in rig.front.log.all_open()) == num_tokens)


@asynccontextmanager
async def running_rig(folder: Path, base: Path, *, has_test_hooks: bool = False, **facts: Any) -> AsyncIterator[Rig]:
    """Start front, server and scripted core; everything ends with the block."""
    tokenizer, client = Tokenizer(base), CoreClient()
    front = Front(tokenizer, client)
    core = ScriptedCore(lambda text: tokenizer.encode_prompt(text, add_special_tokens=False))
    core.facts = build_facts(**facts)
    server = build_server(front, TokenVerifier([SIGNER.public_pem], "engine"), has_test_hooks=has_test_hooks)
    context = zmq.asyncio.Context()
    link = CoreLink(context, folder, 0)
    uds = str(folder / "http")
    async with _serving(server, uds), _client(uds) as http:
        rig = Rig(front, core, client, http, server)
        client.attach(link.send)
        rig.core_task = asyncio.create_task(core.run(link.to_core, link.to_front))
        pump = asyncio.create_task(link.pump(client.receive))
        try:
            await until(lambda: client.is_ready)
            yield rig
        finally:
            for task in (pump, rig.core_task):
                task.cancel()
            await asyncio.gather(pump, rig.core_task, return_exceptions=True)
            client.detach()
            link.close()
            context.destroy(linger=0)
            front.close()


@asynccontextmanager
async def _serving(server: uvicorn.Server, uds: str) -> AsyncIterator[None]:
    server.config.uds = uds
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def _client(uds: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=uds)
    # a tenant's, who may also call what is internal
    headers = {"authorization": f"Bearer {sign(role='admin')}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers, timeout=20) as http:
        yield http


@asynccontextmanager
async def opened_stream(rig: Rig, path: str, body: dict[str, Any], **headers: str) -> AsyncIterator[httpx.Response]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.suppress(httpx.ReadError):
        async with rig.http.stream("POST", path, json=body | {"stream": True}, headers=names) as response:
            yield response
