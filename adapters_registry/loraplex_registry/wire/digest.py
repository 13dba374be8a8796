"""The digest as text: `sha256:` and 64 lower-case hex digits, and the path of its artifact in any store."""

from __future__ import annotations

import re

DIGEST_PATTERN = r"sha256:[0-9a-f]{64}"
DIGEST_LEN = len("sha256:") + 64
_DIGEST = re.compile(DIGEST_PATTERN)


def check_digest(text: str) -> str:
    """Return `text` if it is a digest.

    Raises:
        ValueError: It is not `sha256:` and 64 lower-case hex digits.
    """
    if _DIGEST.fullmatch(text) is None:
        raise ValueError("a digest is 'sha256:' and 64 lower-case hex digits")
    return text


def artifact_path(digest: str) -> str:
    """Return `sha256/ab/cd/<hex>`, the folder of the artifact relative to the store's root."""
    hexadecimal = check_digest(digest).removeprefix("sha256:")
    return f"sha256/{hexadecimal[:2]}/{hexadecimal[2:4]}/{hexadecimal}"
