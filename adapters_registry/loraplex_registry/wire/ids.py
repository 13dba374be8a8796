"""Identifiers: UUIDv7 for rows, prefixed random text for what people and clients see."""

from __future__ import annotations

import secrets
import uuid

from uuid_utils.compat import uuid7

_NUM_CHARS = 26
# each byte to one of 32 characters, all as often
_BASE32 = bytes(b"abcdefghijklmnopqrstuvwxyz234567"[byte % 32] for byte in range(256))


def new_uuid() -> uuid.UUID:
    """Return a fresh UUIDv7, so that keys grow with time."""
    return uuid7()


def new_public_id(prefix: str) -> str:
    """Return `prefix_` and 26 random base32 characters (130 bits), such as `evt_...`."""
    return f"{prefix}_{secrets.token_bytes(_NUM_CHARS).translate(_BASE32).decode()}"
