"""How the engine ends every generation towards the gateway, and the private headers between the two.

The gateway adds these headers beside its identity token and strips them from clients; nothing here reaches a client.
"""

from __future__ import annotations

import msgspec

# request headers
REQUEST_ID = "x-loraplex-request-id"
TENANT_ID = "x-loraplex-tenant-id"
DEADLINE_MS = "x-loraplex-deadline-ms"
PRIORITY = "x-loraplex-priority"
CACHE_SALT = "x-loraplex-cache-salt"
ECHO_MODEL = "x-loraplex-echo-model"
TIMEOUT = "x-request-timeout"
# `1` asks for the done event (streams) or the done header (everything else)
DONE = "x-loraplex-done"
# response header
DIGEST = "x-loraplex-digest"

DONE_EVENT = "loraplex.done"
BASE_DIGEST = "base"


class RequestDone(msgspec.Struct, frozen=True):
    """What one HTTP request cost, over all its choices: the truth that usage is settled from.

    Tokens count the prompt once (per prompt, not per choice) and every token up to the one that completed a stop
    string. A request that failed before its first token has zeros. Times are seconds, the slowest choice's.
    `finish` is `stop`, `length`, `abort` or `error`; `digest` is the adapter's, or `base`.
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


class RequestStatus(msgspec.Struct, frozen=True):
    """What the engine knows of one request: running with its progress so far, or finished."""

    request_id: str
    state: str
    """`running` or `finished`."""
    done: RequestDone
    """Final when finished; else the tokens so far, with `finish` empty."""


encode_done = msgspec.json.Encoder().encode
decode_done = msgspec.json.Decoder(RequestDone).decode
