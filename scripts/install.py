"""Install packages into the virtual environment that runs this, with uv: in a tenth of the time that pip takes.

.venv/bin/python scripts/install.py ARGUMENTS OF `uv pip install`

What the machine's owner has told pip of indexes, certificates and proxies holds for uv too. Exits with uv's code, or
with 3 where pip has to do it: uv is not installed, or pip was told something that uv cannot be.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

CANNOT = 3
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_EXTRA_INDEX_URL",),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "constraint": ("UV_CONSTRAINT",),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
}
_WITHOUT_EFFECT = {
    "disable-pip-version-check", "no-input", "progress-bar", "quiet", "verbose", "no-color", "root-user-action",
    "break-system-packages", "require-virtualenv", "cache-dir", "no-cache-dir", "no-warn-script-location", "retries",
}  # fmt: skip
_SECTIONS = ("global", "install", ":env:")
"""The later overrides."""


def read_pip_settings(listing: str) -> dict[str, str]:
    """Return what `pip config list` shows of `pip install`, by the option's name."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing.splitlines():
        name, is_setting, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if is_setting and section in found and option != "config-file":
            found[section][option.replace("_", "-")] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def translate(settings: Mapping[str, str]) -> tuple[dict[str, str], list[str]] | None:
    """Return the variables and the flags that tell uv the same, or None if it cannot be told."""
    variables: dict[str, str] = {}
    flags: list[str] = []
    for option, value in settings.items():
        if option in _VARIABLES:
            parts = value.split()
            joined = ",".join(parts) if option == "find-links" else " ".join(parts)
            variables |= dict.fromkeys(_VARIABLES[option], joined)
        elif option == "no-index":
            flags += ["--no-index"] if value.lower() in ("1", "true", "yes", "on") else []
        elif option not in _WITHOUT_EFFECT:
            return None
    return variables, flags


def main(arguments: Sequence[str]) -> int:
    """Run uv as pip would be run here."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(argv, capture_output=True, text=True, check=False)
    told = translate(read_pip_settings(listing.stdout)) if listing.returncode == 0 else None
    if told is None or importlib.util.find_spec("uv") is None:
        return CANNOT
    variables, flags = told
    # pip takes the newest of all indexes, and not of the first that has the package
    argv = [sys.executable, "-m", "uv", "pip", "install", "--index-strategy", "unsafe-best-match", *flags, *arguments]
    return subprocess.run(argv, env=variables | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
