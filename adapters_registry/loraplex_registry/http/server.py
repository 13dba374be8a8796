"""How uvicorn is set up, by every part alike: the bounded protocol, no lines of its own in the log, no banner."""

from __future__ import annotations

from typing import Any

import uvicorn

from loraplex_registry.http.protocol import KEEP_ALIVE_S, BoundedProtocol


def build_config(app: Any, grace_s: int, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration.

    Args:
        app: The ASGI application.
        grace_s: How long answers may go on after a signal.
        options: As `uvicorn.Config` takes them.
    """
    fields: dict[str, Any] = {
        "http": BoundedProtocol,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": grace_s,
    }
    return uvicorn.Config(app, **fields | options)
