"""Look for keys in files: `python scripts/find_secrets.py [FILE...]`, by default in all that git knows.

Keys of this project are known by their checksum, those of others by their form.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "platform"))

from loraplex.keys.secret import is_broken  # noqa: E402

KINDS = (
    ("a key of Loraplex", "lpx_", r"lpx_[0-9A-Za-z]{10}_[0-9A-Za-z]{49}"),
    ("a private key", "PRIVATE KEY", r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}"),
    ("a key of AWS", "IA", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    ("a token of GitHub", "gh", r"\bgh[pousr]_[0-9A-Za-z]{36}"),
    ("a token of GitHub", "github_pat_", r"\bgithub_pat_[0-9A-Za-z_]{60,}"),
    ("a token of Hugging Face", "hf_", r"\bhf_[0-9A-Za-z]{30,}"),
    ("a key of OpenAI", "sk-", r"\bsk-(?:proj-)?[0-9A-Za-z_-]{40,}"),
    ("a token of Slack", "xox", r"\bxox[abprs]-[0-9A-Za-z-]{20,}"),
    ("a key of Google", "AIza", r"\bAIza[0-9A-Za-z_-]{35}"),
    ("a signed token", "eyJ", r"\beyJ[0-9A-Za-z_-]{10,}\.eyJ[0-9A-Za-z_-]{10,}\.[0-9A-Za-z_-]{20,}"),
    ("a password in an address", "://", r"://[^\s:/@\"'{}$<>]{1,64}:(?![A-Z]+@)[^\s:/@\"'{}$<>*]{3,64}@[A-Za-z0-9]"),
)
"""What it is, a text that is always in it, and its form."""
_MADE_UP = "a password in an address"
"""Tests are full of those."""
_MAX_BYTES = 4 << 20


def find_secrets(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of whatever looks like a key."""
    for kind, mark, form in KINDS:
        for match in re.finditer(form, text) if mark in text else ():
            if not (mark == "lpx_" and is_broken(match[0])):
                yield text.count("\n", 0, match.start()) + 1, kind, match[0]


def list_files() -> list[Path]:
    """Return all files that git knows; where there is no git, all."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        return [path for path in ROOT.rglob("*") if path.is_file()]
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def search(paths: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each key in these files."""
    for path in paths:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            continue
        for line, kind, found in find_secrets(path.read_bytes().decode("latin-1")):
            if kind == _MADE_UP and path.is_relative_to(ROOT / "tests"):
                continue
            yield f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: {kind}: {found[:8]}..."


def main() -> int:
    """Say what was found."""
    found = list(search(map(Path, sys.argv[1:]) if sys.argv[1:] else list_files()))
    print("\n".join(found) or "no keys")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
