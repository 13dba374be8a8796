"""`python -m loraplex_registry`: the registry as a process of its own, told everything by its environment.

Exit codes: 0 after a signal, 2 for a bad setting, 3 if the database must be upgraded first, 1 for anything else.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from loraplex_registry.app import check_revision, create_app
from loraplex_registry.errors import BodyTimeoutError, MigrationError, RegistryError, SettingError
from loraplex_registry.http.hardened import Hardened
from loraplex_registry.http.server import Server, build_config
from loraplex_registry.settings import load_settings
from loraplex_registry.wire.identity import TokenVerifier, split_public_keys
from loraplex_registry.wire.log import AccessLog, configure_log
from loraplex_registry.wire.open_files import allow_open_files
from loraplex_registry.wire.reload import Reloader, reload_on_hangup

_DRAIN_S = 30
_log = logging.getLogger(__name__)


def main() -> int:
    """Serve until a signal and return the exit code."""
    allow_open_files()
    try:
        settings = load_settings(os.environ)
        configure_log(settings.log_level, settings.log_format)
        check_revision(settings.registry.database_url)
        app = create_app(settings, on_start=_reload_on_hangup)
    except SettingError as error:
        configure_log("info")
        _log.error("%s", error.message)
        return 2
    except MigrationError as error:
        _log.error("%s", error.message)
        return 3
    except RegistryError as error:
        _log.error("%s", error.message)
        return 1
    build_server(app, host=settings.host, port=settings.port).run()
    return 0


def build_server(app: Any, **options: Any) -> Server:
    """Return the server of a registry's app, not yet started; `options` are those of `uvicorn.Config`."""
    served = AccessLog(Hardened(app, BodyTimeoutError), "loraplex_registry.access")
    return Server(build_config(served, _DRAIN_S, lifespan="on", **options))


def _reload_on_hangup(verifier: TokenVerifier) -> None:
    take = {"LORAPLEX_VERIFY_KEYS": lambda text: verifier.trust(split_public_keys(text))}
    reload_on_hangup(Reloader("registry", os.environ, take))


if __name__ == "__main__":
    sys.exit(main())
