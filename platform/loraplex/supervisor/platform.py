"""`loraplex up`, in order: folder, base, database, children, readiness, base known; then it keeps them running.

`run_platform` is the only owner of the child processes. It serves no request and keeps no state but the folder's lock.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

from loraplex.client.location import Location, is_loopback
from loraplex.keys.files import load_admin_key
from loraplex.supervisor.base import PulledBase, pull_base, register_base
from loraplex.supervisor.child import Child, ChildSpec
from loraplex.supervisor.data_folder import DataFolder, write_private
from loraplex.supervisor.display import Display
from loraplex.supervisor.engine_program import FOR_SERVING, check_engine_installed
from loraplex.supervisor.environment import build_environment
from loraplex.supervisor.errors import StoppedError, UpError
from loraplex.supervisor.flag_check import check_engine_flags
from loraplex.supervisor.migration import migrate
from loraplex.supervisor.option import UpOptions
from loraplex.supervisor.part import Addresses, build_control_environment, build_engine, build_gateway
from loraplex.supervisor.port import check_port_free, find_free_port, hold_engine_port
from loraplex.supervisor.readiness import wait_until_ready, wait_until_served
from loraplex.supervisor.redis_note import describe_redis
from loraplex.supervisor.watch import Watch
from loraplex_registry.wire.ending import end_tasks
from loraplex_registry.wire.identity import Identity, TokenSigner
from loraplex_registry.wire.ids import new_public_id
from loraplex_registry.wire.setting import read_settings

T = TypeVar("T")
_GATEWAY_READY_S, _ENGINE_READY_S, _SERVED_S = 60.0, 600.0, 30.0
_STOP_MARGIN_S, _ENGINE_STOP_S = 5.0, 10.0


@dataclass(frozen=True)
class RunningPlatform:
    """A platform that serves; `is_new_key` at first start, when the admin key was just made; `stop` ends it."""

    admin_key: str = field(repr=False)
    is_new_key: bool
    base: PulledBase
    folder: DataFolder
    addresses: Addresses
    signer: TokenSigner = field(repr=False)
    stop: asyncio.Event = field(repr=False)

    @property
    def location(self) -> Location:
        """Where an admin client finds it."""
        return Location(self.url, self.admin_key, is_direct=True)

    @property
    def url(self) -> str:
        """The gateway's address."""
        return self.addresses.url

    def fetch_engine_metrics(self) -> str:
        """Return the engine's metrics in the Prometheus text format."""
        url = f"{self.addresses.engine_url}/metrics"
        return httpx.get(url, headers=_build_token_header(self.signer), trust_env=False).raise_for_status().text


OnReady = Callable[[RunningPlatform], Awaitable[None]]


async def run_platform(options: UpOptions, environ: Mapping[str, str], display: Display, on_ready: OnReady) -> None:
    """Start the platform, keep it until SIGINT, SIGTERM or `stop`, then drain and stop it.

    Args:
        options: What to run.
        environ: The environment, from which each child gets its own part.
        display: Shows the stages of the start.
        on_ready: Called once when the platform serves.

    Raises:
        UpError: It could not start, or this Python has no engine.
        SettingError: A setting has a bad name or value.
        StoppedError: A signal came before `on_ready` was done.
        ClientError: The registry refused the base.
    """
    check_engine_installed(FOR_SERVING)
    check_binding(options)
    settings = read_settings(environ, "up")
    stop = _stop_on_signals(display, options.drain_s)
    folder = DataFolder(options.data_dir)
    with folder.lock(), hold_addresses(options) as addresses:
        signer = folder.prepare(settings.get("signing_key"))
        admin_key, is_new_key = load_admin_key(settings.get("admin_key"), folder.path)
        base = await _unless(stop, _prepare(options, environ, folder, display))
        specs = [build(options, environ, folder, base, addresses) for build in (build_gateway, build_engine)]
        platform = RunningPlatform(admin_key, is_new_key, base, folder, addresses, signer, stop)
        async with _running(specs, display, options.drain_s) as (gateway, engine):
            await _unless(stop, _wait_and_register(platform, gateway, engine, display))
            if note := await asyncio.to_thread(describe_redis, settings, platform.location):
                display.warn(note)
            write_private(folder.url, platform.url + "\n")
            try:
                async with _watching(display, {addresses.url: gateway, addresses.engine_url: engine}):
                    await _unless(stop, on_ready(platform))
                    await stop.wait()
            finally:
                folder.url.unlink(missing_ok=True)


def check_binding(options: UpOptions) -> None:
    """Return if the gateway may listen where it was told.

    Raises:
        UpError: The address can be reached from elsewhere and nobody said that a proxy has TLS.
    """
    if not is_loopback(options.host) and not options.insecure_behind_proxy:
        raise UpError(
            f"--host {options.host} can be reached from other machines, and keys would cross the network in clear. Put "
            "a proxy with TLS in front and say --insecure-behind-proxy, or keep 127.0.0.1."
        )


@contextmanager
def hold_addresses(options: UpOptions) -> Iterator[Addresses]:
    """Choose ports that are free now; the engine's stays kept for it.

    Raises:
        PortTakenError: The gateway's is not free.
    """
    if options.port:
        check_port_free(options.host, options.port)
    with hold_engine_port(usual=options.port != 0) as engine_port:
        yield Addresses(options.host, options.port or find_free_port(options.host), engine_port)


async def _unless(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """Return what `work` returns, or cancel it when `stop` is set first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StoppedError
        return task.result()
    finally:
        await end_tasks((task, stopped))


async def _prepare(options: UpOptions, environ: Mapping[str, str], folder: DataFolder, display: Display) -> PulledBase:
    env = build_environment(environ, "engine") | {"LORAPLEX_CACHE_DIR": str(options.cache_dir)}
    limits = await check_engine_flags(options.engine_flags, env)
    with display.stage("Base model", spinner=False) as stage:
        pulled = await pull_base(options.base, options.served_model_name, env)
        base = pulled.limit_rank(limits.max_lora_rank)
        stage.result = base.spec.name
    with display.stage("Database") as stage:
        stage.result = await migrate(build_control_environment(environ, folder))
    return base


@asynccontextmanager
async def _running(specs: Sequence[ChildSpec], display: Display, drain_s: float) -> AsyncIterator[list[Child]]:
    """Start the children in order and stop them in order, so the gateway drains while the engine still answers."""

    def tell(name: str, exit_code: int, wait_s: float) -> None:
        display.warn(f"The {name} ended (exit code {exit_code}); it starts again in {wait_s:.0f} s.")

    children = [Child(spec, tell) for spec in specs]
    try:
        for child in children:
            await child.start()
        yield children
    finally:
        gateway, *engines = children
        await gateway.stop(drain_s + _STOP_MARGIN_S)
        for engine in engines:
            await engine.stop(_ENGINE_STOP_S)


@asynccontextmanager
async def _watching(display: Display, url_to_child: Mapping[str, Child]) -> AsyncIterator[None]:
    """End children that fall silent while the block runs; before, and while the platform drains, nobody is judged."""

    def tell(name: str, silent_s: float) -> None:
        display.warn(f"The {name} has answered nothing for {silent_s:.0f} s: it is stuck and is ended.")

    watches = [Watch(child, f"{url}/healthz", tell) for url, child in url_to_child.items()]
    tasks = [asyncio.create_task(watch.run()) for watch in watches]
    try:
        yield
    finally:
        await end_tasks(tasks)


async def _wait_and_register(platform: RunningPlatform, gateway: Child, engine: Child, display: Display) -> None:
    with display.stage("Gateway") as stage:
        await wait_until_ready(gateway, f"{platform.url}/readyz", dict, stage, _GATEWAY_READY_S)
        await asyncio.to_thread(register_base, platform.location, platform.base)
        stage.result = platform.url
    with display.stage("Engine") as stage:
        url = f"{platform.addresses.engine_url}/readyz"
        await wait_until_ready(engine, url, lambda: _build_token_header(platform.signer), stage, _ENGINE_READY_S)
        await wait_until_served(platform.location, stage, _SERVED_S)
    gateway.keep()
    engine.keep()


def _build_token_header(signer: TokenSigner) -> dict[str, str]:
    """Return the header with which the supervisor asks the engine how it is."""
    identity = Identity(
        role="admin_readonly",
        tenant_id=None,
        tenant=None,
        scopes=(),
        key_id="supervisor",
        actor="supervisor",
        request_id=new_public_id("req"),
    )
    return {"authorization": f"Bearer {signer.sign(identity, 'engine')}"}


def _stop_on_signals(display: Display, drain_s: float) -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets; a second one ends this process, and so its children."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def handle() -> None:
        display.say(f"Stopping; running answers get {drain_s:.0f} s. Once more to stop at once.")
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, handle)
    return stop
