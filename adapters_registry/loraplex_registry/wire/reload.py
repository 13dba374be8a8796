"""Settings that are read anew on SIGHUP, from the files of variables `X_FILE`: an environment itself cannot change.

`Reloader` alone knows what is in force. What may change while a part runs is said in the table of settings (`reloads`);
of anything else that changed it says that it takes a restart. A value that is refused changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Mapping

from loraplex_registry.errors import SettingError
from loraplex_registry.wire.log import LEVELS
from loraplex_registry.wire.setting import SETTINGS, Setting, find_setting

Take = Callable[[str], None]
_log = logging.getLogger(__name__)


class Reloader:
    """Reads the settings of one part anew.

    Args:
        part: gateway, registry or engine.
        environ: The part's environment.
        take: Puts a new text in force, by the setting's name; raises where it is not valid. The level of the log needs
            none.
    """

    def __init__(self, part: str, environ: Mapping[str, str], take: Mapping[str, Take]) -> None:
        self._part = part
        self._environ = environ
        self._take: dict[str, Take] = {"LORAPLEX_LOG_LEVEL": set_log_level, **take}
        names = {setting.name for setting in SETTINGS if part in setting.reloads}
        assert names == set(self._take), "the table says what is read anew"
        # what cannot be read now was refused at start, or is not looked at by this part
        self._known = {setting.name: self._read(setting) for setting in self._list_settings()}

    def reload(self) -> None:
        """Put in force what has changed, and log what was done and what was not."""
        changed = [
            (setting, text)
            for setting in self._list_settings()
            if (text := self._read(setting)) is not None and text != self._known[setting.name]
        ]
        if not changed:
            _log.info("SIGHUP: no file of a setting has changed")
        for setting, text in changed:
            if self._part in setting.reloads:
                self._put(setting, text)
            else:
                _log.warning("%s has changed in its file; it is read at the next start", setting.name)

    def _put(self, setting: Setting, text: str) -> None:
        try:
            self._take[setting.name](text)
        except ValueError:
            _log.error("%s stays as it was: its file holds nothing of the right kind", setting.name)
        except Exception as error:
            message = getattr(error, "message", None)
            if not isinstance(message, str):
                raise
            _log.error("%s stays as it was: %s", setting.name, message)
        else:
            self._known[setting.name] = text
            _log.info("%s is read anew", setting.name)

    def _list_settings(self) -> list[Setting]:
        return [setting for setting in SETTINGS if self._part in setting.parts]

    def _read(self, setting: Setting) -> str | None:
        try:
            return find_setting(self._environ, setting, self._part).value
        except SettingError as error:
            _log.error("%s", error.message)
            return None


def set_log_level(text: str) -> None:
    """Log from this level on.

    Raises:
        SettingError: There is no such level.
    """
    if text not in LEVELS:
        raise SettingError(f"LORAPLEX_LOG_LEVEL must be one of {', '.join(LEVELS)}, not {text!r}")
    logging.getLogger().setLevel(text.upper())


def reload_on_hangup(reloader: Reloader) -> None:
    """Reload on SIGHUP in the running loop from now on; a process of a terminal ends with that, as ever."""
    if sys.stdin is not None and sys.stdin.isatty():
        return
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.reload)
