"""From a bearer key to a verified key and tenant. Pure over the directory; knows no HTTP but the header's text."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from loraplex.errors import AuthenticationError, TenantSuspendedError
from loraplex.gateway.directory import Directory, KeyEntry, TenantEntry
from loraplex.keys.secret import is_broken, is_same_secret, parse_key
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id

_MAX_KEY_LEN = 512
# What an unknown id is compared with, so that it costs what a known one costs.
_NOBODY = KeyEntry(
    public_id="",
    lookup="",
    secret_hmac=bytes(32),
    tenant_id=None,
    owner="",
    role="tenant",
    scopes=(),
    expires_at=None,
    is_revoked=True,
)


class Authenticator:
    """Verifies API keys against the directory.

    Args:
        directory: All keys and tenants.
        pepper: What keys are hashed with.
        note_use: Told of each key that opened something, without waiting.
    """

    def __init__(self, directory: Directory, pepper: bytes, note_use: Callable[[str], None] = lambda _: None) -> None:
        self._directory = directory
        self._pepper = pepper
        self._note_use = note_use

    def authenticate(self, authorization: str | None, request_id: str) -> Identity:
        """Return who calls.

        Args:
            authorization: The value of the Authorization header.
            request_id: The gateway's id of this request.

        Raises:
            AuthenticationError: There is no key, or it is not valid, expired or revoked.
            TenantSuspendedError: The key's tenant is suspended.
        """
        key = self._verify(_read_bearer(authorization))
        found = self._build_identity(key, request_id)
        self._note_use(key.public_id)
        return found

    def identify(self, key_id: str, request_id: str) -> Identity:
        """Return whom a key stands for that proved itself before, such as at the start of a session.

        Raises:
            AuthenticationError: It is gone, expired or revoked.
            TenantSuspendedError: The key's tenant is suspended.
        """
        key = self._directory.find_key_by_id(key_id)
        if key is None:
            raise AuthenticationError
        _check_alive(key)
        return self._build_identity(key, request_id)

    def _build_identity(self, key: KeyEntry, request_id: str) -> Identity:
        tenant = self._find_own_tenant(key)
        return Identity(
            role=key.role,
            tenant_id=None if tenant is None else str(tenant.id),
            tenant=None if tenant is None else tenant.name,
            scopes=key.scopes,
            key_id=key.public_id,
            actor=key.owner,
            request_id=request_id,
        )

    def _verify(self, text: str) -> KeyEntry:
        parsed = parse_key(text, self._pepper)
        found = self._directory.find_key(parsed.lookup)
        is_same = is_same_secret(parsed.secret, self._pepper, (found or _NOBODY).secret_hmac)
        if found is None or not is_same:
            if is_broken(text):
                raise AuthenticationError("This is not a whole API key: its last characters do not fit; copy it again.")
            raise AuthenticationError
        _check_alive(found)
        return found

    def _find_own_tenant(self, key: KeyEntry) -> TenantEntry | None:
        """Check that the tenant lives; a platform key belongs to none, but dies with the one it was made under."""
        if key.tenant_id is None:
            return None
        tenant = self._directory.get_tenant(key.tenant_id)
        if tenant.state == "deleted":
            raise AuthenticationError("This API key belongs to a tenant that was deleted.")
        if key.role != "tenant":
            return None
        if tenant.state == "suspended":
            raise TenantSuspendedError
        return tenant


def build_platform_identity() -> Identity:
    """Return whom the platform acts as by itself."""
    return Identity(
        role="admin",
        tenant_id=None,
        tenant=None,
        scopes=(),
        key_id="gateway",
        actor="gateway",
        request_id=new_public_id("req"),
    )


def target(identity: Identity, name: str, directory: Directory) -> Identity | None:
    """Return `identity` with the tenant of a path as its target; None if there is none that the caller may see."""
    if not identity.is_platform and identity.tenant != name:
        return None
    tenant = directory.find_tenant(name)
    if tenant is None:
        return None
    return msgspec.structs.replace(
        identity, target_tenant_id=str(tenant.id), target_tenant=tenant.name, limits=tenant.limits
    )


def get_target_id(identity: Identity) -> uuid.UUID:
    """The id of the tenant named in the path."""
    assert identity.target_tenant_id is not None, "the route names a tenant"
    return uuid.UUID(identity.target_tenant_id)


def _check_alive(key: KeyEntry) -> None:
    if key.is_revoked:
        raise AuthenticationError("This API key was revoked; ask for a new one.")
    if key.expires_at is not None and key.expires_at <= datetime.now(UTC):
        raise AuthenticationError("This API key has expired; ask for a new one.")


def _read_bearer(authorization: str | None) -> str:
    scheme, _, text = (authorization or "").partition(" ")
    text = text.strip()
    if scheme.lower() != "bearer" or not text or len(text) > _MAX_KEY_LEN:
        raise AuthenticationError
    return text
