"""What is written of a request: `RequestRow` before dispatch, `Settlement` at its end."""

from __future__ import annotations

from datetime import datetime

import msgspec


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """Who asked for what, and the replica that had it. `tenant` is the adapter's; for a base, the caller's.

    When it is opened the replica is the one that will be tried first, when it is settled the one tried last.
    """

    request_id: str
    tenant_id: str | None
    tenant: str
    adapter_id: str | None
    adapter: str | None
    version: int | None
    digest: str | None
    base: str
    key_id: str
    route: str
    model: str
    is_stream: bool
    client_request_id: str | None
    tags: dict[str, str] | None
    created_at: datetime
    replica: str


_BY_ITSELF = ("stop", "length")


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's last word on a request (`loraplex.done`): tokens, seconds in each stage, bytes loaded, how it ended.

    `finish` None: the engine had no word, and this is what was seen of it.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0
    finish: str | None = None
    digest: str | None = None
    load_bytes: int = 0


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended: `ok`, `cancelled` (the client went away), `error` or `lost`; `code` is the error's slug."""

    outcome: str
    code: str | None = None
    done: Done = Done()

    @property
    def counted(self) -> Done:
        """What is charged: a request that was ended before its first token costs nothing, as the engine counts too."""
        if self.done.completion_tokens == 0 and self.done.finish not in _BY_ITSELF:
            return Done(finish=self.done.finish, queue_s=self.done.queue_s, load_s=self.done.load_s)
        return self.done
