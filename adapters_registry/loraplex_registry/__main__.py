"""`python -m loraplex_registry`: the registry as a process of its own, told everything by its environment.

Exit codes: 0 after a signal, 2 for a bad setting, 3 if the database must be upgraded first, 1 for anything else.
"""

from __future__ import annotations

import logging
import os
import sys

import uvicorn

from loraplex_registry.app import check_revision, create_app
from loraplex_registry.errors import MigrationError, RegistryError, SettingError
from loraplex_registry.settings import load_settings
from loraplex_registry.wire.log import AccessLog, configure_log
from loraplex_registry.wire.open_files import allow_open_files

_DRAIN_S = 30
_log = logging.getLogger(__name__)


def main() -> int:
    """Serve until a signal and return the exit code."""
    allow_open_files()
    try:
        settings = load_settings(os.environ)
        configure_log(settings.log_level, settings.log_format)
        check_revision(settings.registry.database_url)
        app = create_app(settings)
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
    uvicorn.run(
        AccessLog(app, "loraplex_registry.access"),
        host=settings.host,
        port=settings.port,
        log_config=None,
        timeout_graceful_shutdown=_DRAIN_S,
        access_log=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
