"""What one gateway saw in ten seconds: `Piece`, as a row of `stats_piece` holds it, compressed.

Requests are counted by who asked for what and where it ran (`Key`); engines are sampled once a second.
"""

from __future__ import annotations

import zlib

import msgspec

from loraplex.stats.sketch import Packed
from loraplex_registry.peft.unreadable import UNREADABLE

PIECE_S = 10
"""Pieces of all gateways begin at the same instants: whole multiples of this."""
MINUTE_S = 60
"""Longer ones, of the same, for who looks at an hour."""

TIMERS = ("queue_s", "prefill_s", "time_to_first_token_s", "inter_token_s", "request_s")
LENGTHS = ("prompt_len", "completion_len", "request_len")
SPREADS = (*TIMERS, *LENGTHS)
"""What is kept as quantiles."""

COUNTS = (
    "requests",
    "requests_ok",
    "requests_cancelled",
    "requests_error",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "preemptions",
)
"""What is kept as sums."""

OTHER = "other"
"""Tenant and adapter of what there was no room for, which is of many tenants."""

_FORMAT = 1


def find_minute(at: int) -> int:
    """Return when the minute of an instant began, in seconds of the epoch as that."""
    return at // MINUTE_S * MINUTE_S


class Key(msgspec.Struct, frozen=True, array_like=True):
    """Who asked for what, and the replica that had it; the adapter is None where a base was called."""

    base: str
    tenant_id: str | None
    tenant: str
    adapter: str | None
    replica: str


class EngineSample(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine said of itself at one moment; counts are those of its process, and only grow while it lives.

    `slots` are all adapter slots, `slots_used` those with an adapter in them; evictions are adapters pushed out of one.
    """

    kv_usage: float
    waiting: int
    running: int
    slots: int = 0
    slots_used: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    loads: int = 0
    evictions: int = 0


ENGINE_COUNTS = ("preemptions", "prefix_queries", "prefix_hits", "loads", "evictions")


class EnginePiece(msgspec.Struct, array_like=True):
    """Samples of one engine with the second of the piece that each is of, and by how much its counts grew."""

    replica: str
    base: str
    seconds: list[int]
    samples: list[EngineSample]
    growth: list[int]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Ten seconds of one gateway.

    `counts` are 64-bit numbers, for each key those of `COUNTS`; `spreads` has one packing for each of `SPREADS`, whose
    rows are the keys.
    """

    keys: list[Key]
    counts: bytes
    spreads: list[Packed]
    engines: list[EnginePiece]


def encode_piece(piece: Piece) -> bytes:
    """Return the bytes of a piece."""
    return bytes([_FORMAT]) + zlib.compress(msgspec.msgpack.encode(piece), level=1)


def decode_piece(content: bytes) -> Piece | None:
    """Return the piece of some bytes, None if another release wrote them in a form of its own, or they rotted."""
    if content[:1] != bytes([_FORMAT]):
        return None
    try:
        return _decoder.decode(zlib.decompress(content[1:]))
    except (zlib.error, *UNREADABLE):
        return None


_decoder = msgspec.msgpack.Decoder(Piece)
