"""Settings: parsed once, refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.errors import SettingsError
from loraplex.settings import check_exposure, load_settings

DATA = {"LORAPLEX_DATA_DIR": "/srv/loraplex"}


def test_a_data_folder_is_enough() -> None:
    settings = load_settings(DATA)
    assert settings.database_url == "sqlite+aiosqlite:////srv/loraplex/loraplex.db"
    assert settings.object_store_url == "file:///srv/loraplex/objects"
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.drain_s == 30.0
    assert load_settings({**DATA, "LORAPLEX_DRAIN_S": "600"}).drain_s == 600.0


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, "LORAPLEX_DATA_DIR"),
        ({**DATA, "LORAPLEX_POOL": "{}"}, "LORAPLEX_POOLS"),
        ({**DATA, "LORAPLEX_LISTEN": "8080"}, "LORAPLEX_LISTEN"),
        ({**DATA, "LORAPLEX_LISTEN": "127.0.0.1:99999"}, "LORAPLEX_LISTEN"),
        ({**DATA, "LORAPLEX_LOG_LEVEL": "loud"}, "LORAPLEX_LOG_LEVEL"),
        ({**DATA, "LORAPLEX_REDIS_URL": "http://h"}, "LORAPLEX_REDIS_URL"),
        ({**DATA, "LORAPLEX_REDIS_URL": "redis://:p/ss@h:6379"}, "LORAPLEX_REDIS_URL"),
        ({**DATA, "LORAPLEX_TRUSTED_PROXIES": "10.0.0.1/8"}, "LORAPLEX_TRUSTED_PROXIES"),
        ({**DATA, "LORAPLEX_DATABASE_POOL_SIZE": "0"}, "LORAPLEX_DATABASE_POOL_SIZE"),
        ({**DATA, "LORAPLEX_REGISTRY_URL": "http://h"}, "LORAPLEX_REGISTRY_URL"),
        *(({**DATA, "LORAPLEX_DRAIN_S": text}, "LORAPLEX_DRAIN_S") for text in ("-1", "3601", "soon", "1e3", "1.2.3")),
    ],
)
def test_a_bad_setting_is_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(environ)


def test_other_machines_are_let_in_only_behind_a_proxy() -> None:
    settings = load_settings({**DATA, "LORAPLEX_LISTEN": "0.0.0.0:8080"})
    with pytest.raises(SettingsError, match="insecure-behind-proxy"):
        check_exposure(settings)
    check_exposure(replace(settings, insecure_behind_proxy=True))
    check_exposure(load_settings({**DATA, "LORAPLEX_LISTEN": "[::1]:8080"}))
