"""The text of an API key: `lpx_` + id (10) + `_` + secret (43) + CRC32 (6), all base 62.

The id finds the row; only HMAC-SHA256(pepper, secret) is stored; the CRC lets scanners tell a key from noise.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_PREFIX = "lpx_"
_ID_LEN, _SECRET_LEN, _CRC_LEN = 10, 43, 6
_KEY = re.compile(rf"{_PREFIX}([0-9A-Za-z]{{{_ID_LEN}}})_([0-9A-Za-z]{{{_SECRET_LEN}}})([0-9A-Za-z]{{{_CRC_LEN}}})")


@dataclass(frozen=True, slots=True)
class KeyText:
    """A key as its holder has it: `lookup` finds its row, `secret` proves it."""

    lookup: str
    secret: str = field(repr=False)


def new_key_text() -> str:
    """Return a fresh key of 256 random bits."""
    body = f"{_PREFIX}{_random(_ID_LEN)}_{_random(_SECRET_LEN)}"
    return body + _crc(body)


def parse_key(text: str, pepper: bytes) -> KeyText:
    """Split a key; whatever it is, something comes out, so that bad keys cost what good ones cost.

    A text of another form (an operator's own admin key) is looked up by a keyed hash of itself.
    """
    match = _KEY.fullmatch(text)
    if match is not None and _crc(text[:-_CRC_LEN]) == match[3]:
        return KeyText(lookup=match[1], secret=match[2])
    foreign = hmac_secret(f"lookup:{text}", pepper).hex()
    return KeyText(lookup=f"~{foreign[:30]}", secret=text)


def is_broken(text: str) -> bool:
    """Whether a text began as a key and is none: cut, lengthened or mistyped. It says nothing of any key there is."""
    match = _KEY.fullmatch(text)
    return text.startswith(_PREFIX) and (match is None or _crc(text[:-_CRC_LEN]) != match[3])


def hmac_secret(secret: str, pepper: bytes) -> bytes:
    """HMAC-SHA256(pepper, secret), 32 bytes."""
    return hmac.new(pepper, secret.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()


def is_same_secret(secret: str, pepper: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(hmac_secret(secret, pepper), expected)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _crc(body: str) -> str:
    value = zlib.crc32(body.encode())
    digits = []
    for _ in range(_CRC_LEN):
        value, digit = divmod(value, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
