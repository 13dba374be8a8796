"""A closed-loop load of streamed completions, by the client of `loraplex bench`, and what benchmarks read of it.

Knows HTTP and the OpenAI stream, nothing of the server behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from report import percentile

from loraplex.bench.client import Server
from loraplex.bench.length import Lengths
from loraplex.bench.load import Load, Measured, run_in_loop, send_load
from loraplex.bench.text import Text
from loraplex.bench.workload import Workload as Question
from loraplex.bench.workload import build_requests


@dataclass(frozen=True)
class Target:
    """A server as its clients see it."""

    name: str
    url: str
    models: tuple[str, ...]
    """Drawn uniformly; one name is one model for all."""
    keys: tuple[str, ...] = ("",)
    """The key of each model, or one for all."""

    def to_server(self) -> Server:
        """The same for the client."""
        own = dict(zip(self.models, self.keys, strict=True)) if len(self.keys) > 1 else {}
        return Server(self.url, self.keys[0], own)


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


class Outcome:
    """What the clients saw; seconds."""

    def __init__(self, measured: Measured) -> None:
        answered = [outcome for outcome in measured.outcomes if not outcome.error]
        self.seconds = measured.seconds
        self.num_tokens = sum(outcome.completion_tokens for outcome in answered)
        self.first_s = [outcome.first_s for outcome in answered]
        self.gaps_s = [gap for outcome in answered for gap in outcome.gaps_s]
        self.errors = [f"{outcome.error}: {outcome.message}" for outcome in measured.outcomes if outcome.error]

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


def run_load(target: Target, work: Workload, words: Text, seed: int, prefix_seed: int | None = None) -> Outcome:
    """Send all requests of a workload, so many at once, and wait for the last token.

    Args:
        target: the server.
        work: the workload.
        words: makes the prompts.
        seed: decides prompts and models, alike for every server.
        prefix_seed: decides the shared prefix; `seed` does where None.
    """
    question = Question(
        models=target.models,
        prompt=Lengths(work.prompt_len, work.prompt_len),
        output=Lengths(work.max_tokens, work.max_tokens),
        prefix_len=work.prefix_len,
        has_same_prefix=True,
        extra=work.extra,
    )
    of_prefix = seed if prefix_seed is None else prefix_seed
    requests = build_requests(question, words, work.num_requests, of_prefix, seed)
    load = Load(concurrency=work.concurrency)
    return Outcome(run_in_loop(send_load(target.to_server(), question.path, requests, load, lambda: None)))
