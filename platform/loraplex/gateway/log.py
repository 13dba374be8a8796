"""How the gateway process logs: as every part does, and of libraries only what goes wrong."""

from __future__ import annotations

import logging

from loraplex_registry.wire import log

_NOISY = ("aiosqlite", "boto3", "botocore", "httpcore", "httpx", "s3transfer", "urllib3")


def configure_log(level: str, form: str | None) -> None:
    """Log from `level` on, as `form` says (None: text to a terminal, else JSON)."""
    log.configure_log(level, form)
    # they log every call at info, or all that they carry at debug: keys' hashes, what clients call themselves
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
