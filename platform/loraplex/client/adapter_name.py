"""Names of adapters as people write them: `TENANT`, `TENANT/ADAPTER`, `TENANT/ADAPTER@WHICH`."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.client.errors import ClientError
from loraplex_registry.wire.naming import is_alias_name, is_name

DEFAULT_NAME = "default"


@dataclass(frozen=True)
class AdapterRef:
    """A parsed name; `adapter` is None for the tenant's default, `which` None where no version was named."""

    tenant: str
    adapter: str | None
    which: str | None

    def require_number(self) -> int:
        """Return the version number.

        Raises:
            ClientError: No number was given.
        """
        if self.which is None or not (self.which.isascii() and self.which.isdigit()):
            name = f"{self.tenant}/{self.adapter or DEFAULT_NAME}"
            raise ClientError(f"Say which version by number, as in {name}@3.", code="invalid_name")
        return int(self.which)

    def require_alias(self, default: str) -> str:
        """Return the alias, `default` where none was named.

        Raises:
            ClientError: A version was named instead.
        """
        if self.which is None:
            return default
        if self.which[0].isdigit() or ":" in self.which:
            raise ClientError(
                f"{self.which} is a version, and this is about an alias, as in "
                f"{self.tenant}/{self.adapter or DEFAULT_NAME}@{default}.",
                code="invalid_name",
            )
        return self.which


def parse_ref(text: str) -> AdapterRef:
    """Return the parts of a name.

    Raises:
        ClientError: It is none.
    """
    name, at, which = text.partition("@")
    tenant, slash, adapter = name.partition("/")
    if not is_name(tenant) or (slash and not is_name(adapter)) or (at and not _is_which(which)):
        raise ClientError(
            f"{text!r} is not TENANT, TENANT/ADAPTER or TENANT/ADAPTER@VERSION; names are 1 to 63 of a-z, 0-9 and '-', "
            "a version is its number, an alias or sha256:…",
            code="invalid_name",
        )
    return AdapterRef(tenant, adapter or None, which or None)


def _is_which(text: str) -> bool:
    return is_alias_name(text) or (text.isascii() and text.isdigit()) or text.startswith("sha256:")
