"""The front process: composes the parts, serves HTTP, keeps a core running, and ends in order on SIGTERM.

`main` is what `python -m loraplex_engine serve` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from loraplex_engine.config import CoreLaunch, EngineConfig
from loraplex_engine.errors import BodyTimeoutError, ConfigError, DrainingError
from loraplex_engine.server.adapter_file import AdapterFiles
from loraplex_engine.server.app import build_app
from loraplex_engine.server.core_client import CoreClient
from loraplex_engine.server.core_process import CoreProcess
from loraplex_engine.server.front import Front
from loraplex_engine.server.guard import AUDIENCE
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_registry.http.hardened import Hardened
from loraplex_registry.http.server import build_config
from loraplex_registry.wire.identity import TokenError, TokenVerifier, split_public_keys
from loraplex_registry.wire.log import FORMATS, AccessLog, configure_log
from loraplex_registry.wire.open_files import allow_open_files
from loraplex_registry.wire.reload import Reloader, reload_on_hangup
from loraplex_registry.wire.setting import read_drain_s

DEFAULT_LISTEN = "127.0.0.1:8100"
_DRAIN_S = "30"
_MAX_PORT = 65_535
_LAST_WRITES_S = 5
_log = logging.getLogger(__name__)


class Secrets(msgspec.Struct, frozen=True):
    """What the front is told by its environment and tells nobody."""

    verify_keys: tuple[bytes, ...]
    engine_key: str

    def __repr__(self) -> str:
        return f"Secrets({len(self.verify_keys)} verify keys)"


def main(config: EngineConfig, settings: Mapping[str, str], *, core_command: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: The engine's settings; its `base` is a folder.
        settings: What `read_settings` found: `listen` (HOST:PORT; port 0 takes a free one, which is printed),
            `verify_keys`, `engine_key`, `log_level`, `drain_s` (seconds that open requests get at the end).
        core_command: How to start the core; the default is this interpreter's `loraplex_engine core`.

    Returns:
        The exit code 0, after an orderly end.

    Raises:
        EngineError: The engine cannot start; the message says why.
    """
    # read by the tokenizer's threads when they start
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    form = _read_format(settings)
    configure_log(_read_level(settings), form)
    if form is not None:
        # for the core, which knows no settings
        os.environ["LORAPLEX_LOG_FORMAT"] = form
    allow_open_files()
    secrets = read_secrets(settings)
    drain_s = read_drain_s(settings.get("drain_s", _DRAIN_S))
    listener = _listen(settings.get("listen", DEFAULT_LISTEN))
    if config.has_test_hooks:
        _check_hooks(listener)
    command = core_command or (sys.executable, "-m", "loraplex_engine", "core")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config, secrets, command, listener, drain_s))
    return 0


def _read_level(settings: Mapping[str, str]) -> str:
    level = settings.get("log_level", "info").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"LORAPLEX_LOG_LEVEL is {level.lower()!r}, but must be debug, info, warning or error.")
    return level


def _read_format(settings: Mapping[str, str]) -> str | None:
    form = settings.get("log_format")
    if form is not None and form not in FORMATS:
        raise ConfigError(f"LORAPLEX_LOG_FORMAT is {form!r}, but must be {' or '.join(FORMATS)}.")
    return form


def read_secrets(settings: Mapping[str, str]) -> Secrets:
    """Return the keys among the settings.

    Raises:
        ConfigError: There is no verify key.
    """
    text = settings.get("verify_keys")
    if not text:
        raise ConfigError(
            "Set LORAPLEX_VERIFY_KEYS to the gateway's public key (PEM): the engine trusts only that. "
            "`loraplex up` keeps it in its data folder: LORAPLEX_VERIFY_KEYS_FILE=DATA_DIR/verify.pem."
        )
    try:
        return Secrets(split_public_keys(text), settings.get("engine_key", ""))
    except TokenError as error:
        raise ConfigError(f"LORAPLEX_VERIFY_KEYS {error.message}.") from error


def _listen(address: str) -> socket.socket:
    host, _, digits = address.rpartition(":")
    host = host.strip("[]")
    if not host or not digits.isdecimal() or int(digits) > _MAX_PORT:
        raise ConfigError(f"Cannot listen on {address!r}: give HOST:PORT.")
    port = int(digits)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {address}: {error.strerror}.") from error
    listener.listen(2048)
    return listener


def _check_hooks(listener: socket.socket) -> None:
    """Say loudly that the routes for tests are open.

    Raises:
        ConfigError: Others than this machine could reach them.
    """
    host = listener.getsockname()[0]
    if not ipaddress.ip_address(host).is_loopback:
        listener.close()
        raise ConfigError(f"LORAPLEX_TEST_HOOKS is for tests on one machine: listen on 127.0.0.1, not on {host}.")
    _log.warning("LORAPLEX_TEST_HOOKS is set: /internal/test reaches past the checks; never serve anybody like this")


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: this process has its own order of ending."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def build_server(front: Front, verifier: TokenVerifier, *, has_test_hooks: bool = False) -> uvicorn.Server:
    """Return the HTTP server of a front, not yet started."""
    app = Hardened(build_app(front, verifier, has_test_hooks=has_test_hooks), BodyTimeoutError)
    return _Server(build_config(AccessLog(app, "loraplex_engine.access"), _LAST_WRITES_S))


async def _run(
    config: EngineConfig, secrets: Secrets, command: Sequence[str], listener: socket.socket, drain_s: float
) -> None:
    client = CoreClient()
    files = AdapterFiles(config.cache_dir, config.registry_url, secrets.engine_key)
    front = Front(_load_tokenizer(Path(config.base)), client, files, tool_call_parser=config.tool_call_parser)
    front.warm()

    def build_launch(to_core: str, to_front: str) -> CoreLaunch:
        return CoreLaunch(config=config, to_core=to_core, to_front=to_front, engine_key=secrets.engine_key)

    core = CoreProcess(command, build_launch, client, step_timeout_s=config.step_timeout_s)
    front.metrics.core_restarts.set_function(lambda: core.num_restarts)
    front.metrics.core_stuck.set_function(lambda: core.num_stuck)
    verifier = _build_verifier(secrets)
    reload_on_hangup(
        Reloader("engine", os.environ, {"LORAPLEX_VERIFY_KEYS": lambda text: verifier.trust(split_public_keys(text))})
    )
    server = build_server(front, verifier, has_test_hooks=config.has_test_hooks)
    await run_front(front, core, server, listener, drain_s)


def _load_tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer(folder)
    except OSError as error:
        raise ConfigError(f"{folder} is not a base's folder: {error.strerror} ({error.filename}).") from error


def _build_verifier(secrets: Secrets) -> TokenVerifier:
    try:
        return TokenVerifier(secrets.verify_keys, AUDIENCE)
    except (TokenError, ValueError) as error:
        raise ConfigError(f"LORAPLEX_VERIFY_KEYS holds a key that cannot be read: {error}.") from error


async def run_front(
    front: Front, core: CoreProcess, server: uvicorn.Server, listener: socket.socket, drain_s: float
) -> None:
    """Serve until a signal, then drain for at most `drain_s` seconds, answer what is left, and stop the core.

    Raises:
        StartupError: The core could not load its model.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sys.stdout.write(f"listening on {_url(listener)} (503 until the core is ready)\n")
    sys.stdout.flush()
    tasks = [
        asyncio.create_task(core.run(), name="core"),
        asyncio.create_task(server.serve(sockets=[listener]), name="http"),
        asyncio.create_task(stop.wait(), name="signal"),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            _log.info("draining %s open requests", front.log.num_open)
            await front.drain(drain_s)
    finally:
        front.fail_all(DrainingError())
        server.should_exit = True
        await core.stop()
        await asyncio.gather(tasks[1], return_exceptions=True)
        front.close()
        tasks[2].cancel()
        if not tasks[0].done():
            tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=stop.is_set())


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
