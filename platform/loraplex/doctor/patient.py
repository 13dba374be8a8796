"""What doctor looks at: the settings of one part, and where the platform answers. Knows which texts are secret."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from loraplex.client.location import Location
from loraplex.config.resolved import Resolved
from loraplex.doctor.finding import Finding
from loraplex.supervisor.data_folder import DataFolder
from loraplex_registry.wire.setting import mask_passwords

_MIN_SECRET_LEN = 4
_OTHER_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "LORAPLEX_API_KEY", "PGPASSWORD")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class RegistryDoor:
    """What doctor asks of the registry as a library."""

    probe_store: Callable[[str, str | None], Iterator[Any]]
    check_store_url: Callable[..., None]
    load_settings: Callable[[Mapping[str, str]], object]
    current: Callable[[str], str | None]
    head: Callable[[], str]
    knows_revision: Callable[[str], bool]
    serves: Callable[[str], bool]


@dataclass(frozen=True)
class Patient:
    """One part on this machine; `location` is the gateway that is asked, None where nothing says which."""

    resolved: Resolved
    environ: Mapping[str, str] = field(repr=False)
    door: RegistryDoor
    location: Location | None
    limit_s: float

    @property
    def part(self) -> str:
        """Whose settings these are."""
        return self.resolved.part

    @property
    def folder(self) -> DataFolder | None:
        """The data folder."""
        return self.resolved.folder

    def value(self, name: str) -> str | None:
        """Return the text of a setting."""
        return self.resolved.value(name)

    def hide(self, finding: Finding) -> Finding:
        """Return a finding without any secret in it."""
        message, remedy = finding.message, finding.remedy
        for secret in self._list_secrets():
            message, remedy = message.replace(secret, "***"), remedy.replace(secret, "***")
        return msgspec.structs.replace(finding, message=mask_passwords(message), remedy=mask_passwords(remedy))

    def _list_secrets(self) -> list[str]:
        found = {self.environ.get(name, "") for name in _OTHER_SECRETS}
        if self.location is not None and self.location.key:
            found.add(self.location.key)
        urls = [value for name, value in self.environ.items() if name.lower() in _PROXIES]
        for one in self.resolved.settings.values():
            if one.value is not None and one.setting.is_secret and one.source != "default":
                (urls.append if "://" in one.value else found.add)(one.value)
        for url in urls:
            password = _find_password(url)
            found |= {password, unquote(password)}
        # longer ones first: one may be part of another
        return sorted((text for text in found if len(text) >= _MIN_SECRET_LEN), key=len, reverse=True)


def _find_password(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""
