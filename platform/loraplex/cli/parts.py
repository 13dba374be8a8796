"""`loraplex gateway` and `loraplex engine`: one part of the platform in this process, for setups of many machines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli.engine_flag import EngineFlags

_NO_FLAGS = EngineFlags()


def gateway(
    *,
    listen: str | None = None,
    insecure_behind_proxy: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run the gateway, with the registry in it, until SIGTERM. Settings come from LORAPLEX_* variables.

    Args:
        listen: HOST:PORT; default LORAPLEX_LISTEN, else 127.0.0.1:8080.
        insecure_behind_proxy: Listen beyond this machine without TLS, because a proxy in front has it.
    """
    from dataclasses import replace

    from loraplex.app import run
    from loraplex.settings import load_settings

    environ = dict(os.environ)
    if listen:
        environ.pop("LORAPLEX_LISTEN_FILE", None)
        environ["LORAPLEX_LISTEN"] = listen
    return run(replace(load_settings(environ), insecure_behind_proxy=insecure_behind_proxy))


def engine(
    *,
    base: str | None = None,
    listen: str | None = None,
    registry_url: str | None = None,
    served_model_name: str | None = None,
    cache_dir: Path | None = None,
    engine_flags: EngineFlags = _NO_FLAGS,
) -> None:
    """Run one engine: becomes the engine's own program, which judges what it is given.

    Args:
        base: Folder, or name of a base in this machine's cache (loraplex base pull). Default LORAPLEX_ENGINE_BASE.
        listen: HOST:PORT; default LORAPLEX_LISTEN, else 127.0.0.1:8100.
        registry_url: Where adapters come from: the gateway's URL. Default LORAPLEX_REGISTRY_URL.
        served_model_name: Name under which the base is served, as the pool has it.
        cache_dir: Bases and adapters on disk. Default LORAPLEX_CACHE_DIR, else ~/.cache/loraplex.
        engine_flags: What it takes, and how it computes.
    """
    from loraplex.supervisor.engine_program import FOR_SERVING, check_engine_installed

    check_engine_installed(FOR_SERVING)
    given = {
        "--base": base,
        "--listen": listen,
        "--registry-url": registry_url,
        "--served-model-name": served_model_name,
        "--cache-dir": cache_dir,
    }
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    argv = [sys.executable, "-m", "loraplex_engine", "serve", *words, *engine_flags.to_argv()]
    sys.stdout.flush()
    os.execv(sys.executable, argv)  # noqa: S606 - no shell is wanted
