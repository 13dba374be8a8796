"""What is asked: `Workload` says it in general, `build_requests` writes every body before the first is sent.

The same workload, seed and repeat give the same requests, so that two servers can be asked the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loraplex.bench.length import Lengths
from loraplex.bench.popularity import build_chooser
from loraplex.bench.text import Text
from loraplex.bench.trace import TraceRow


@dataclass(frozen=True)
class Workload:
    """Lengths, models and prefixes of the requests, and further fields of their bodies."""

    models: tuple[str, ...]
    prompt: Lengths
    output: Lengths
    popularity: str = "uniform"
    prefix_len: int = 0
    """Tokens that prompts with a shared prefix begin with."""
    prefix_share: float = 1.0
    """The share of requests that have one."""
    num_prefixes: int = 1
    has_same_prefix: bool = False
    """Whether every repeat has the same prefixes, so that all but the first find them in a cache."""
    is_chat: bool = False
    ignores_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    trace: tuple[TraceRow, ...] = ()

    @property
    def path(self) -> str:
        """The route that is called."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def build_body(self, model: str, prompt: str, max_tokens: int, index: int = 0) -> bytes:
        """Return the JSON of one request; each has its own seed where tokens are drawn."""
        body: dict[str, Any] = {"model": model}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        body |= {"max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.extra.get("temperature"):
            body["seed"] = index
        return msgspec.json.encode(body | dict(self.extra))


@dataclass(frozen=True)
class Request:
    """One request, ready to send; `at_s` is its moment from the start, where the load has a clock."""

    model: str
    body: bytes
    at_s: float = 0.0


def build_requests(workload: Workload, text: Text, num_requests: int, seed: int, repeat: int) -> list[Request]:
    """Return the requests of one repeat; those of a trace carry its times.

    Args:
        workload: What they are like.
        text: Writes the prompts.
        num_requests: How many; a trace is cut there.
        seed: Decides all that is drawn.
        repeat: Its number: other prompts in each.
    """
    rng = random.Random(f"{seed} {repeat}")  # noqa: S311 - no secret
    prefixes = _write_prefixes(workload, text, random.Random(f"prefix {seed} {workload.has_same_prefix or repeat}"))  # noqa: S311
    choose = build_chooser(workload.popularity, workload.models, rng)
    if workload.trace:
        return [
            Request(model, workload.build_body(model, _write(row, text, rng), row.max_tokens, index), row.timestamp)
            for index, row in enumerate(workload.trace[:num_requests])
            for model in [row.model or choose(index)]
        ]
    requests = []
    for index in range(num_requests):
        model = choose(index)
        prefix = rng.choice(prefixes) if prefixes and rng.random() < workload.prefix_share else ""
        num_own = workload.prompt.draw(rng) - (0 if prefix else round(text.overhead))
        prompt = prefix + text.make(num_own, rng)
        requests.append(Request(model, workload.build_body(model, prompt, workload.output.draw(rng), index)))
    return requests


def _write_prefixes(workload: Workload, text: Text, rng: random.Random) -> list[str]:
    if not workload.prefix_len:
        return []
    num_tokens = workload.prefix_len - round(text.overhead)
    return [text.make(num_tokens, rng) for _ in range(workload.num_prefixes)]


def _write(row: TraceRow, text: Text, rng: random.Random) -> str:
    return text.make(row.prompt_tokens - round(text.overhead), rng) if row.prompt is None else row.prompt
