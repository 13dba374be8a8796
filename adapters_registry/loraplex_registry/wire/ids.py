"""Identifiers: UUIDv7 for rows, prefixed random text for what people and clients see."""

from __future__ import annotations

import base64
import secrets
import uuid

from uuid_utils.compat import uuid7


def new_uuid() -> uuid.UUID:
    """Return a fresh UUIDv7, so that keys grow with time."""
    return uuid7()


def new_public_id(prefix: str) -> str:
    """Return `prefix_` and 26 random base32 characters (128 bits), such as `evt_...`."""
    return f"{prefix}_{base64.b32encode(secrets.token_bytes(16)).decode().rstrip('=').lower()}"
