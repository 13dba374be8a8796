"""A closed-loop load of streamed completions over plain sockets, so light that it leaves the cores to the server.

Knows HTTP and the OpenAI stream, nothing of the server behind it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from report import percentile
from tokenizers import Tokenizer

_LINE_BYTES = 1 << 20
_REQUEST_S = 600.0


@dataclass(frozen=True)
class Target:
    """A server as its clients see it."""

    name: str
    url: str
    models: tuple[str, ...]
    """Drawn uniformly; one name is one model for all."""
    keys: tuple[str, ...] = ("",)
    """The key of each model, or one for all."""

    def key_of(self, model: str) -> str:
        """The key that may call a model."""
        return self.keys[self.models.index(model)] if len(self.keys) > 1 else self.keys[0]


@dataclass(frozen=True)
class Workload:
    """What is asked: tokens, and how many requests are open at once."""

    num_requests: int
    concurrency: int
    prompt_len: int
    max_tokens: int
    prefix_len: int = 0
    """Tokens that all prompts of a round begin with."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body."""

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn; each request then has a seed."""
        return bool(self.extra.get("temperature"))


@dataclass
class Outcome:
    """What the clients saw; seconds."""

    seconds: float
    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests over the time of all."""
        return self.num_tokens / self.seconds

    def first_ms(self, percent: float) -> float:
        """Percentile of the time to first token."""
        return 1e3 * percentile(self.first_s, percent)

    def gap_ms(self, percent: float) -> float:
        """Percentile of the time between tokens."""
        return 1e3 * percentile(self.gaps_s, percent)


class Words:
    """Prompts of an exact number of tokens, each a word of the base's vocabulary with its space."""

    def __init__(self, base: Path) -> None:
        vocabulary = Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab()
        words = (piece[1:] for piece in vocabulary if piece.startswith("Ġ"))
        self._words = sorted(word for word in words if 3 <= len(word) <= 8 and word.isascii() and word.isalpha())

    def make(self, num_tokens: int, rng: random.Random) -> str:
        """A text of so many tokens."""
        return "".join(f" {word}" for word in rng.choices(self._words, k=num_tokens))


def run_load(target: Target, work: Workload, words: Words, seed: int, prefix_seed: int | None = None) -> Outcome:
    """Send all requests of a workload, so many at once, and wait for the last token.

    Args:
        target: the server.
        work: the workload.
        words: makes the prompts.
        seed: decides prompts and models, alike for every server.
        prefix_seed: decides the shared prefix; `seed` does where None.
    """
    rng = random.Random(seed)
    prefix = words.make(work.prefix_len, random.Random(f"prefix {seed if prefix_seed is None else prefix_seed}"))
    bodies = [
        {
            "model": rng.choice(target.models),
            "prompt": prefix + words.make(work.prompt_len, rng),
            "max_tokens": work.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **work.extra,
            **({"seed": index} if work.is_sampled else {}),
        }
        for index in range(work.num_requests)
    ]
    return asyncio.run(_send_all(target, bodies, work.concurrency))


async def _send_all(target: Target, bodies: Sequence[dict[str, Any]], concurrency: int) -> Outcome:
    outcome, queue = Outcome(0.0), iter(bodies)
    began_at = time.perf_counter()
    await asyncio.gather(*(_work(target, queue, outcome) for _ in range(concurrency)))
    outcome.seconds = time.perf_counter() - began_at
    return outcome


async def _work(target: Target, queue: Iterator[dict[str, Any]], outcome: Outcome) -> None:
    for body in queue:
        try:
            async with asyncio.timeout(_REQUEST_S):
                await _stream(target, body, outcome)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            outcome.errors.append(repr(error))


async def _stream(target: Target, body: dict[str, Any], outcome: Outcome) -> None:
    where, content = urlsplit(target.url), msgspec.json.encode(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {target.key_of(body['model'])}"
        f"\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=_LINE_BYTES)
    try:
        began_at = time.perf_counter()
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status!r}: {(await reader.read())[-300:]!r}")
        await _read_events(reader, began_at, outcome)
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, began_at: float, outcome: Outcome) -> None:
    last_at: float | None = None
    while line := await reader.readline():
        # between them are the headers and the lengths of chunks
        if not line.startswith(b"data:"):
            continue
        if line[5:].strip() == b"[DONE]":
            return
        now, event = time.perf_counter(), msgspec.json.decode(line[5:])
        if "error" in event:
            raise ValueError(str(event["error"]))
        if event.get("usage"):
            outcome.num_tokens += event["usage"]["completion_tokens"]
        if not event.get("choices") or (event["choices"][0]["finish_reason"] and not event["choices"][0]["text"]):
            continue
        if last_at is None:
            outcome.first_s.append(now - began_at)
        else:
            outcome.gaps_s.append(now - last_at)
        last_at = now
    raise ValueError("the stream ended early")
