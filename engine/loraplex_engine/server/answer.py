"""Carries one generation to its client: waits for the first token, streams or answers whole, ends it if nobody reads.

`GenerationAnswer` is an ASGI app. It sends nothing before the first token or the error, so the status is the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from litestar.types import Receive, Scope, Send

from loraplex_engine.errors import ClientGoneError, EngineError
from loraplex_engine.server.choice import Update, merge
from loraplex_engine.server.chunk import Answer, Renderer
from loraplex_engine.server.echo import PartOptions, PromptPart, RenderedPart, render_part
from loraplex_engine.server.generation import MAX_PENDING_BYTES, Generation
from loraplex_engine.server.http_error import error_body, error_headers, status_of
from loraplex_engine.server.metric import FrontMetrics
from loraplex_engine.wire import done as private
from loraplex_engine.wire.done import RequestDone
from loraplex_registry.wire.log import note

# a stream that has tokens but no text yet says so this often
_QUIET_S = 5.0
_NOTED = (
    *("digest", "finish", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("queue_s", "load_s", "prefill_s", "decode_s", "preemptions"),
)
_STREAM_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-store"))


class AnswerOptions(msgspec.Struct, frozen=True):
    """How the client wants its answer."""

    is_stream: bool
    includes_usage: bool
    includes_done: bool
    part: PartOptions = PartOptions()
    """What is said of the prompt."""


class GenerationAnswer:
    """The answer to one request; call it once."""

    def __init__(
        self, generation: Generation, renderer: Renderer, options: AnswerOptions, metrics: FrontMetrics
    ) -> None:
        self._generation = generation
        self._renderer = renderer
        self._options = options
        self._metrics = metrics
        self._opened: set[int] = set()
        self._parts: dict[int, RenderedPart] = {}
        self._is_started = False
        self._written_at = 0.0

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Run the generation and send it."""
        watcher = asyncio.create_task(self._wait_for_disconnect(receive))
        try:
            self._generation.start()
            await (self._stream(send) if self._options.is_stream else self._send_whole(send))
        except EngineError as error:
            await self._send_error(send, error)
        finally:
            watcher.cancel()
            # has ended already, unless this task was cancelled or failed
            self._generation.cancel()

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        """Cancel the generation as soon as the client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.cancel()

    async def _stream(self, send: Send) -> None:
        self._generation.max_pending_bytes = MAX_PENDING_BYTES
        async for updates in self._generation.updates():
            if not self._is_started:
                await self._start(send, 200, _STREAM_HEADERS)
            for update in updates:
                if update.prompt is not None:
                    await self._write_prompt(send, update.index, update.prompt)
            data = b"".join(map(self._render, updates)) or self._build_sign_of_life()
            if data:
                await self._write(send, data)
        done = await self._settle()
        usage = self._renderer.usage(done) if self._options.includes_usage else b""
        await self._write(send, usage + self._done_event(done) + _event(b"[DONE]"), is_last=True)

    async def _settle(self) -> RequestDone:
        done = await self._generation.settle()
        note(**{name: getattr(done, name) for name in _NOTED})
        return done

    async def _write_prompt(self, send: Send, index: int, prompt: PromptPart) -> None:
        """Send what a choice says of its prompt, piece by piece."""
        part = await self._render_part(prompt)
        opening = self._open(index)
        if opening:
            await self._write(send, opening)
        for event in self._renderer.prompt(index, part):
            await self._write(send, event)
            await asyncio.sleep(0)

    async def _render_part(self, prompt: PromptPart) -> RenderedPart:
        """Return a prompt's part, rendered once for all choices."""
        if id(prompt) not in self._parts:
            self._parts[id(prompt)] = await render_part(
                prompt, self._generation.table, self._options.part, self._renderer.writer
            )
        return self._parts[id(prompt)]

    def _open(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self._renderer.opening(index)

    def _render(self, update: Update) -> bytes:
        events = self._open(update.index)
        if update.text or update.entries or update.calls:
            events += self._renderer.text(update)
        if update.finish is not None:
            events += self._renderer.finish(update.index, update.finish)
        return events

    async def _send_whole(self, send: Send) -> None:
        answers: dict[int, list[Update]] = {}
        async for updates in self._generation.updates():
            for update in updates:
                answers.setdefault(update.index, []).append(update)
        done = await self._settle()
        joined = [_join(answers[index]) for index in sorted(answers)]
        parts = [None if update.prompt is None else await self._render_part(update.prompt) for update in joined]
        body = self._renderer.whole(list(map(Answer, joined, parts)), done)
        await self._start(send, 200, [("content-type", "application/json"), *self._done_headers(done)], len(body))
        await self._write(send, body, is_last=True)

    async def _send_error(self, send: Send, error: EngineError) -> None:
        """Say what went wrong: as the whole answer, or as the last event of a stream."""
        if isinstance(error, ClientGoneError):
            self._metrics.aborts.inc()
        done, body = await self._settle(), error_body(error)
        if self._is_started:
            await self._write(send, self._done_event(done) + _event(body), is_last=True)
            return
        await self._start(send, status_of(error), [*error_headers(error), *self._done_headers(done)], len(body))
        await self._write(send, body, is_last=True)

    async def _start(
        self, send: Send, status: int, headers: Sequence[tuple[str, str]], length: int | None = None
    ) -> None:
        self._is_started = self._generation.is_answered = True
        spec = self._generation.spec
        every = [*headers, ("x-request-id", spec.request_id), (private.DIGEST, spec.digest or private.BASE_DIGEST)]
        if length is not None:
            every.append(("content-length", str(length)))
        raw = [(name.encode(), value.encode()) for name, value in every]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Send bytes, as fast as the client takes them; one that takes none is cut off by the protocol."""
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._written_at = asyncio.get_running_loop().time()

    def _build_sign_of_life(self) -> bytes:
        """Return a comment when tokens have come for a while without text (a character or stop string half-way)."""
        is_quiet = asyncio.get_running_loop().time() - self._written_at > _QUIET_S
        return b":\n\n" if is_quiet else b""

    def _done_event(self, done: RequestDone) -> bytes:
        return _event(private.encode_done(done), private.DONE_EVENT) if self._options.includes_done else b""

    def _done_headers(self, done: RequestDone) -> list[tuple[str, str]]:
        return [(private.DONE, private.encode_done(done).decode())] if self._options.includes_done else []


def _event(data: bytes, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def _join(updates: Sequence[Update]) -> Update:
    """Return one choice's updates as one."""
    text = "".join(update.text for update in updates)
    entries = [entry for update in updates for entry in update.entries]
    calls = merge([call for update in updates for call in update.calls])
    return Update(updates[0].index, text, updates[-1].finish, entries, calls, updates[0].prompt)
