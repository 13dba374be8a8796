"""How every part logs: one line an event on standard error, as text or JSON, with what is known of its request.

`AccessLog` opens the facts of a request, `note` adds to them wherever they become known, and each line of the request
has them. What clients made up stays inside its line: characters that end lines or move a terminal are escaped.
Nothing here sees prompts, answers or keys; nobody passes them in.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import msgspec

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_FACTS = "facts"
_QUIET = ("/healthz", "/readyz", "/metrics", "/internal/state", "/internal/names")
# what Unicode does not print, and what turns the order of what it prints
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_request_facts: ContextVar[dict[str, Any] | None] = ContextVar("request_facts", default=None)

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]
_App = Callable[[Any, Any, Any], Awaitable[None]]


def configure_log(level: str, form: str | None = None) -> None:
    """Log from `level` on; `form` is one of `FORMATS`, None: text to a terminal, JSON to anything else."""
    chosen = form or ("text" if sys.stderr.isatty() else "json")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if chosen == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def note(**facts: Any) -> None:
    """Add to what is known of the request that runs here; None is nothing."""
    known = _request_facts.get()
    if known is not None:
        known.update({name: value for name, value in facts.items() if value is not None})


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then facts, and `error` with the trace if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        shown = {
            "time": _show_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _make_whole(record.getMessage()),
            **{name: _make_whole(value) for name, value in _find_facts(record).items()},
        }
        if record.exc_info:
            shown["error"] = _make_whole(self.formatException(record.exc_info))
        line = msgspec.json.encode(shown, enc_hook=str).decode()
        return _HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, then facts as name=value; lines of a trace are marked as such."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        facts = "".join(f" {name}={_show_value(value)}" for name, value in _find_facts(record).items())
        line = f"{_show_time(record)} {record.levelname} {record.name} {_escape(record.getMessage())}{facts}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n    | {_escape(part)}" for part in trace.splitlines())
        return line


class AccessLog:
    """Wraps an ASGI application: one line at the end of each request, with its status, seconds and facts."""

    def __init__(self, app: _App, logger: str) -> None:
        self._app = app
        self._log = logging.getLogger(logger)

    async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts: dict[str, Any] = {}
        token = _request_facts.set(facts)
        began_at = time.perf_counter()
        status = 0
        first_s = 0.0

        async def send_and_look(message: _Message) -> None:
            nonlocal status, first_s
            if message["type"] == "http.response.start":
                status, first_s = message["status"], time.perf_counter() - began_at
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            route = facts.pop("route", None) or scope.get("path_template") or "none"
            level = logging.DEBUG if route in _QUIET else logging.INFO
            if self._log.isEnabledFor(level):
                times = {"answered_s": round(first_s, 6), "took_s": round(time.perf_counter() - began_at, 6)}
                more = {"method": scope["method"], "route": route, "status": status, **times}
                self._log.log(level, "%s %s %d", scope["method"], route, status, extra={_FACTS: more})
            _request_facts.reset(token)


def _find_facts(record: logging.LogRecord) -> dict[str, Any]:
    return {**(_request_facts.get() or {}), **getattr(record, _FACTS, {})}


def _show_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _make_whole(value: Any) -> Any:
    """Halves of characters, which no encoding has, are escaped."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _show_value(value: Any) -> str:
    text = _escape(str(value))
    return f'"{text}"' if " " in text or '"' in text else text


def _escape(text: str) -> str:
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
