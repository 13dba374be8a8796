"""Who is calling, as the gateway vouches for it to registry and engine: a short-lived Ed25519 token.

The gateway holds the private key; the parts hold public keys and accept nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterable
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from loraplex_registry.errors import TokenError

__all__ = [
    "ROLES",
    "AdapterLimits",
    "Identity",
    "TokenError",
    "TokenSigner",
    "TokenVerifier",
    "generate_signing_key",
    "split_public_keys",
]
ROLES = ("tenant", "admin", "admin_readonly", "engine")
_ALGORITHM = "EdDSA"
_REQUIRED = ["aud", "exp", "iat", "jti"]
LEEWAY_S = 5
"""How far the clocks of signer and verifier may differ."""

_MAX_TOKEN_LEN = 16 << 10
# what the library and the reading of claims make of tokens that are none
_BROKEN = (jwt.PyJWTError, KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a tenant may store: None is no limit of its own.

    `adapter_bytes` is the sum over its versions that are not purged, `adapter_versions` their number, `adapter_rank`
    the highest rank, which a base may limit further.
    """

    adapter_bytes: int | None = None
    adapter_versions: int | None = None
    adapter_rank: int | None = None


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a request; `tenant` is its own, `target_tenant` the one named in the path.

    `limits` are those of the target tenant, whoever calls.
    """

    role: str
    tenant_id: str | None
    tenant: str | None
    scopes: tuple[str, ...]
    key_id: str
    actor: str
    request_id: str
    target_tenant_id: str | None = None
    target_tenant: str | None = None
    limits: AdapterLimits | None = None

    @property
    def is_admin(self) -> bool:
        """Whether the caller may do everything; read-only admins may not."""
        return self.role == "admin"

    @property
    def is_platform(self) -> bool:
        """Whether the caller belongs to the platform and sees every tenant."""
        return self.role in ("admin", "admin_readonly")

    def has_scope(self, scope: str) -> bool:
        """Say whether the caller may act under `scope`: admins always, read-only admins for `*:read`."""
        if self.role == "admin":
            return True
        if self.role == "admin_readonly":
            return scope.endswith(":read")
        return scope in self.scopes


def generate_signing_key() -> bytes:
    """Return a new private key as PEM (PKCS8, Ed25519)."""
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def split_public_keys(text: str) -> tuple[bytes, ...]:
    """Return the public keys in `text`: PEM blocks one after another, or a JSON list of them.

    Raises:
        TokenError: There is none.
    """
    try:
        blocks = "\n".join(msgspec.json.decode(text, type=list[str])) if text.lstrip().startswith("[") else text
    except msgspec.DecodeError as error:
        raise TokenError("is not a JSON list of PEM keys") from error
    keys = tuple(f"{block}\n".encode() for block in _PEM.findall(blocks))
    if not keys:
        raise TokenError("holds no public key; give the gateway's in PEM")
    return keys


def _key_id(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return base64.urlsafe_b64encode(hashlib.sha256(raw).digest()[:12]).decode()


def _encode_part(part: dict[str, Any]) -> bytes:
    return _encode_bytes(msgspec.json.encode(part))


def _encode_bytes(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


class TokenSigner:
    """Signs identities with one private key."""

    def __init__(self, private_pem: bytes) -> None:
        key = serialization.load_pem_private_key(private_pem, password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise TokenError("the signing key is not an Ed25519 private key in PEM")
        self._key = key
        self.kid = _key_id(key.public_key())
        self._head = _encode_part({"alg": _ALGORITHM, "kid": self.kid, "typ": "JWT"})
        self.public_pem = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def sign(self, identity: Identity, audience: str, ttl_s: int = 60) -> str:
        """Return a token for `audience` (`registry` or `engine`) that is good for `ttl_s` seconds."""
        claims = {name: value for name, value in msgspec.to_builtins(identity).items() if value is not None}
        now = int(time.time())
        claims |= {"jti": claims.pop("request_id"), "aud": audience, "iat": now, "exp": now + ttl_s}
        # the library's own way takes twice as long as the signature, and there is one for each request
        signed = b"%b.%b" % (self._head, _encode_part(claims))
        return f"{signed.decode()}.{_encode_bytes(self._key.sign(signed)).decode()}"


class TokenVerifier:
    """Verifies tokens for one audience against any of several public keys, chosen by `kid`."""

    def __init__(self, public_pems: Iterable[bytes], audience: str) -> None:
        self._audience = audience
        self.trust(public_pems)

    def trust(self, public_pems: Iterable[bytes]) -> None:
        """Trust these keys from now on, and no others.

        Raises:
            TokenError: One is no Ed25519 public key in PEM; then nothing changes.
        """
        keys: dict[str, Ed25519PublicKey] = {}
        for pem in public_pems:
            key = serialization.load_pem_public_key(pem)
            if not isinstance(key, Ed25519PublicKey):
                raise TokenError("a verify key is not an Ed25519 public key in PEM")
            keys[_key_id(key)] = key
        self._keys = keys

    @property
    def kids(self) -> tuple[str, ...]:
        """Ids of the keys that are trusted."""
        return tuple(self._keys)

    def verify(self, token: str) -> Identity:
        """Return the identity in `token`.

        Raises:
            TokenError: It is malformed, expired, for another audience or signed by an unknown key.
        """
        if len(token) > _MAX_TOKEN_LEN:
            raise TokenError
        try:
            key = self._keys[jwt.get_unverified_header(token).get("kid", "")]
            claims = jwt.decode(
                token, key, [_ALGORITHM], audience=self._audience, leeway=LEEWAY_S, options={"require": _REQUIRED}
            )
            return self._read(claims)
        except _BROKEN as error:
            raise TokenError from error

    @staticmethod
    def _read(claims: dict[str, Any]) -> Identity:
        names = set(Identity.__struct_fields__)
        body: dict[str, Any] = {"tenant_id": None, "tenant": None}
        # a newer gateway may vouch for more than this part knows of
        body |= {name: value for name, value in claims.items() if name in names}
        if isinstance(limits := body.get("limits"), dict):
            body["limits"] = {name: value for name, value in limits.items() if name in AdapterLimits.__struct_fields__}
        identity = msgspec.convert(body | {"request_id": claims["jti"]}, Identity)
        if identity.role not in ROLES:
            raise KeyError(identity.role)
        return identity
