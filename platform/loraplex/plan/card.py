"""Cards by name and the bytes that their driver reports, which are not those of the name. Data and a parser."""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from loraplex.errors import InvalidRequestError

CARD_TO_MIB = {
    "t4": 15_360,
    "l4": 23_034,
    "a10": 23_028,
    "l40s": 46_068,
    "a100-40g": 40_960,
    "a100-80g": 81_920,
    "h100-80g": 81_559,
    "h200": 143_771,
}
"""What nvidia-smi shows as the card's whole memory, MiB."""
_ALSO = {"h100": "h100-80g", "h100-80gb": "h100-80g", "a100": "a100-80g", "a100-80gb": "a100-80g"} | {
    "a100-40gb": "a100-40g",
    "h200-141g": "h200",
    "a10g": "a10",
}
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?(?:(GiB|MiB|GB)|)")
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9, None: 1 << 30}


class Card(msgspec.Struct, frozen=True):
    """A card and its memory."""

    name: str
    memory_bytes: int


def read_card(text: str) -> Card:
    """Return the card of that name, or one of that size: `24`, `24GiB`, `24576MiB`, `24GB`; GiB unless told.

    Raises:
        InvalidRequestError: It is neither.
    """
    name = _ALSO.get(text.lower(), text.lower())
    if name in CARD_TO_MIB:
        return Card(name, CARD_TO_MIB[name] << 20)
    match = _SIZE.fullmatch(text)
    if match is None or not (size := int(Fraction(match[1]) * _UNITS[match[2]])):
        raise InvalidRequestError(
            f"The card {text!r} is not known; known are {', '.join(CARD_TO_MIB)}, or give its memory, as in 24GiB.",
            param="gpu",
        )
    return Card(text, size)
