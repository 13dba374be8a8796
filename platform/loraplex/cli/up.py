"""`loraplex up`: everything on this machine, in the foreground."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from loraplex.cli.engine_flag import EngineFlags
from loraplex.cli.output import AsJson, print_json, say, stderr, stdout
from loraplex.cli.program import name_program

if TYPE_CHECKING:
    from loraplex.client.types import Replica
    from loraplex.supervisor.platform import RunningPlatform

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 8080
_NO_FLAGS = EngineFlags()


def up(
    *,
    base: str | None = None,
    data_dir: Path | None = None,
    host: str | None = None,
    port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65535))] = None,
    served_model_name: str | None = None,
    insecure_behind_proxy: Annotated[bool, Parameter(negative=())] = False,
    demo: Annotated[bool, Parameter(negative=())] = False,
    once: Annotated[bool, Parameter(negative=())] = False,
    engine_flags: EngineFlags = _NO_FLAGS,
    as_json: AsJson = False,
) -> None:
    """Run everything on this machine until Ctrl-C: gateway, registry and engine, with SQLite and a folder of objects.

    At first start it prints the admin key, which also lies in DATA_DIR/admin.key. Logs are in DATA_DIR/logs.

    Args:
        base: Folder, hub id, .gguf file or name; fetched if absent. Default LORAPLEX_ENGINE_BASE, else smollm2-135m.
        data_dir: Database, objects and keys. Default LORAPLEX_DATA_DIR, else ~/.local/share/loraplex.
        host: Address to listen on; another than loopback needs --insecure-behind-proxy.
        port: Port to listen on, 8080 if not given; 0 takes a free one.
        served_model_name: Name of the base in the API.
        insecure_behind_proxy: Listen beyond this machine without TLS, because a proxy in front has it.
        demo: Show three example teams and the base answering one question. Its data is thrown away, unless --data-dir
            names a folder, which is kept; LORAPLEX_DATA_DIR is not looked at.
        once: With --demo: stop after the answers.
        engine_flags: Passed on to the engine.
        as_json: Print one line of JSON with url, base and key file when it serves.
    """
    from loraplex.client.location import default_data_dir
    from loraplex.supervisor.display import Display
    from loraplex.supervisor.errors import UpError
    from loraplex.supervisor.option import DEFAULT_BASE, UpOptions
    from loraplex.supervisor.platform import run_platform
    from loraplex_registry.wire.setting import read_drain_s, read_settings

    if once and not demo:
        raise UpError("--once belongs to --demo: it stops the demonstration after the answers.")
    settings = read_settings(os.environ, "up")
    told_host, told_port = split_listen(settings.get("listen"))
    with ExitStack() as stack:
        if demo and data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-demo-")))
        options = UpOptions(
            data_dir=data_dir or default_data_dir(os.environ),
            cache_dir=Path(settings["cache_dir"]).expanduser().absolute(),
            base=base or settings.get("engine_base") or DEFAULT_BASE,
            served_model_name=served_model_name or settings.get("engine_served_model_name") or "",
            host=host or told_host or _DEFAULT_HOST,
            port=port if port is not None else 0 if demo else told_port or _DEFAULT_PORT,
            insecure_behind_proxy=insecure_behind_proxy,
            engine_flags=engine_flags.to_argv(),
            drain_s=read_drain_s(settings["drain_s"]),
        )

        async def on_ready(platform: RunningPlatform) -> None:
            if as_json:
                print_ready(platform)
            if demo:
                from loraplex.demo.show import run_demo

                await run_demo(platform, Display(stderr()), stdout(), stop_after=once)
            elif not as_json:
                engines, has_tenants = await asyncio.to_thread(look_around, platform)
                greet(platform, engines, has_tenants=has_tenants)

        asyncio.run(run_platform(options, os.environ, Display(stderr()), on_ready))


def split_listen(text: str | None) -> tuple[str | None, int | None]:
    """Return host and port of LORAPLEX_LISTEN.

    Raises:
        UpError: It is not HOST:PORT.
    """
    from loraplex.supervisor.errors import UpError

    if not text:
        return None, None
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UpError(f"LORAPLEX_LISTEN must be HOST:PORT, not {text!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def print_ready(platform: RunningPlatform) -> None:
    """Print one document for programs; the key itself stays in its file."""
    print_json(
        {
            "url": platform.url,
            "base": platform.base.spec.name,
            "admin_key_file": str(platform.folder.admin_key),
            "data_dir": str(platform.folder.path),
        },
        one_line=True,
    )


def look_around(platform: RunningPlatform) -> tuple[list[Replica], bool]:
    """Return the engines as the gateway sees them, and whether there are tenants already."""
    from loraplex.client.connection import Connection
    from loraplex.client.management import Management

    with Connection(platform.location) as connection:
        client = Management(connection)
        return client.list_fleet(), bool(client.list_tenants())


def greet(platform: RunningPlatform, engines: Sequence[Replica], *, has_tenants: bool) -> None:
    """Print where it serves and how, the key at first start, and what to do next."""
    from loraplex.cli.status import describe_engine

    base = platform.base.spec.name
    stdout().print(f"Loraplex serves {base} at {platform.url}", soft_wrap=True)
    if platform.is_new_key:
        stdout().print(f"Admin key (also in {platform.folder.admin_key}): {platform.admin_key}", soft_wrap=True)
    for engine in engines:
        say(f"Engine: {describe_engine(engine)}")
    say("Next, in another terminal:")
    for line in build_next_lines(platform.folder.path, base, has_tenants=has_tenants):
        say(f"  {line}")
    say("Ctrl-C stops it.")


def build_next_lines(data_dir: Path, base: str, *, has_tenants: bool) -> list[str]:
    """Return commands for another terminal, which knows nothing of this one's settings.

    On a platform that was used before the next step is not the first one.
    """
    from loraplex.client.location import default_data_dir

    elsewhere = {name: value for name, value in os.environ.items() if name != "LORAPLEX_DATA_DIR"}
    is_default = data_dir == default_data_dir(elsewhere).resolve()
    program = name_program()
    return [
        *([] if is_default else [f"export LORAPLEX_DATA_DIR={shlex.quote(str(data_dir))}"]),
        f"{program} status" if has_tenants else f"{program} tenants create team-x",
        f'{program} chat --model {base} "Hello!"',
    ]
