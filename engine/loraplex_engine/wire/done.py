"""How the engine ends every generation towards the gateway, and the private headers between the two.

The gateway adds these headers beside its identity token and strips them from clients; nothing here reaches a client.
"""

from __future__ import annotations

import msgspec

# request headers
REQUEST_ID = "x-loraplex-request-id"
TENANT_ID = "x-loraplex-tenant-id"
# whole number from 1 on: how many shares of the engine the tenant has
WEIGHT = "x-loraplex-weight"
DEADLINE_MS = "x-loraplex-deadline-ms"
PRIORITY = "x-loraplex-priority"
CACHE_SALT = "x-loraplex-cache-salt"
ECHO_MODEL = "x-loraplex-echo-model"
TIMEOUT = "x-request-timeout"
# `1` asks for the done event (streams) or the done header (everything else)
DONE = "x-loraplex-done"
# response header
DIGEST = "x-loraplex-digest"

PASSING_CODES = frozenset({"draining", "unavailable", "replica_failed", "queue_full"})
"""Errors that say nothing of another engine: gateways try that, unless the client has had a byte of the answer."""

DONE_EVENT = "loraplex.done"
BASE_DIGEST = "base"


class RequestDone(msgspec.Struct, frozen=True):
    """What one HTTP request cost, over all its choices: the truth that usage is settled from.

    Tokens count the prompt once (per prompt, not per choice) and every token up to the one that completed a stop
    string. A request that was ended before its first token has zeros, and so has one that failed by one of
    `PASSING_CODES` before its client had a byte of it. Times are seconds, the slowest choice's.
    `load_bytes` are those of the adapter, as often as it was put into a slot for this request. `finish` is `stop`,
    `length`, `abort` or `error`; `digest` is the adapter's, or `base`.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    load_s: float
    decode_s: float
    preemptions: int
    finish: str
    digest: str
    load_bytes: int = 0

    @property
    def is_charged(self) -> bool:
        """Whether it came to its own end or to a token; what did neither costs nothing, and may be tried elsewhere."""
        return self.completion_tokens > 0 or self.finish in ("stop", "length")


class UsageTotals(msgspec.Struct, frozen=True):
    """What all requests that ended in one process of an engine cost, each counted once, when it ended.

    They only grow; a process that starts anew has another `process_id` and begins at zero. `discarded_tokens` were
    sampled behind a stop string before the model could be told, and belong to nobody: they are in no `RequestDone`.
    `requests` are those that are charged, `free_requests` the others.
    """

    process_id: str
    age_s: float
    """Seconds since the process began to count."""
    requests: int = 0
    free_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    discarded_tokens: int = 0
    load_bytes: int = 0


class UsageReport(msgspec.Struct, frozen=True):
    """The totals of one moment, and the last requests that are in them, in the order in which they ended."""

    totals: UsageTotals
    finished: list[RequestDone]


class RequestStatus(msgspec.Struct, frozen=True):
    """What the engine knows of one request: running with its progress so far, or finished."""

    request_id: str
    state: str
    """`running` or `finished`."""
    done: RequestDone
    """Final when finished; else the tokens so far, with `finish` empty."""


encode_done = msgspec.json.Encoder().encode
decode_done = msgspec.json.Decoder(RequestDone).decode
