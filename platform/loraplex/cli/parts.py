"""`loraplex gateway` and `loraplex engine`: one part of the platform in this process, for setups of many machines."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import Parameter


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


def engine(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Run one engine: hands over to `python -m loraplex_engine serve`, whose --help names its flags.

    Args:
        arguments: As the engine takes them: --base NAME --listen HOST:PORT --registry-url URL ...
    """
    argv = [sys.executable, "-m", "loraplex_engine", "serve", *arguments]
    sys.stdout.flush()
    os.execv(sys.executable, argv)  # noqa: S606 - no shell is wanted
