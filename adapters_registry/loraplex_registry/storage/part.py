"""What a part of a large upload is, and how a client may send it: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple


class PartPlace(NamedTuple):
    """Where a part of an upload lies: number `number` of file `file`, both from 0."""

    file: int
    number: int


@dataclass(frozen=True)
class Part:
    """A part that is to come: its place, its size in bytes and the sha256 of its bytes in hex."""

    place: PartPlace
    size: int
    sha256: str


@dataclass(frozen=True)
class SignedPart:
    """How a client sends one part straight to the store; the store refuses other bytes than the part's."""

    url: str
    method: str
    headers: dict[str, str]
    expires_at: datetime
