"""What a URL of an S3 store says: s3://BUCKET/PREFIX?endpoint=...&region=...; credentials are never in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from loraplex_registry.errors import SettingError

_NAME = "LORAPLEX_OBJECT_STORE_URL"
_PUBLIC_NAME = "LORAPLEX_OBJECT_STORE_PUBLIC_URL"
_PARAMS = ("endpoint", "region", "path_style", "sse", "sse_kms_key_id", "checksum")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()-]+(/[A-Za-z0-9!_.*'()-]+)*")
_CHECKSUMS = ("sha256", "md5")
_ENCRYPTIONS = ("AES256", "aws:kms")


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """Where a store lies and how it is spoken to."""

    bucket: str
    prefix: str = ""
    """What all keys begin with: empty, or ends with a slash."""

    endpoint: str | None = None
    """Address of a server that is not AWS's own."""

    region: str | None = None

    path_style: bool = False
    """The bucket stands in the path, not in the host's name."""

    sse: str | None = None
    """Encryption at rest that each object asks for: AES256 or aws:kms."""

    sse_kms_key_id: str | None = None

    checksum: str = "sha256"
    """What the server checks on every write; with md5, for servers that know nothing newer, clients cannot send parts
    to the server themselves."""

    public_endpoint: str | None = None
    """The host in presigned URLs, where clients reach the server by another name."""


def parse_address(url: str, public_url: str | None = None) -> S3Address:
    """Return what `url` says.

    Raises:
        SettingError: A part of it is not valid, or a parameter is not known; the message names it.
    """
    parts = _split(url, _NAME)
    if "@" in parts.netloc:
        raise SettingError(f"{_NAME} must hold no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if not _BUCKET.fullmatch(parts.netloc) or parts.fragment:
        raise SettingError(f"{_NAME} must be s3://BUCKET/PREFIX?endpoint=...; the bucket's name is not valid")
    prefix = unquote(parts.path).strip("/")
    if prefix and (not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise SettingError(f"{_NAME}: the prefix may hold letters, digits and !_.*'()- between single slashes")
    params = _read_params(parts.query)
    return S3Address(
        bucket=parts.netloc,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=_check_endpoint(params.get("endpoint"), f"{_NAME}: endpoint"),
        region=params.get("region"),
        path_style=_choose(params, "path_style", ("0", "1"), "0") == "1",
        sse=_choose(params, "sse", _ENCRYPTIONS, None),
        sse_kms_key_id=_check_kms_key(params),
        checksum=_choose(params, "checksum", _CHECKSUMS, "sha256") or "sha256",
        public_endpoint=_check_endpoint(public_url, _PUBLIC_NAME),
    )


def _split(url: str, name: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        # looks at the port
        _ = parts.port
    except ValueError as error:
        raise SettingError(f"{name} is not an address: {error}") from error
    return parts


def _read_params(query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    params = dict(pairs)
    unknown = sorted(params.keys() - set(_PARAMS))
    if unknown:
        raise SettingError(f"{_NAME}: {unknown[0]!r} is not known; parameters are {', '.join(_PARAMS)}")
    if len(params) < len(pairs):
        raise SettingError(f"{_NAME}: a parameter is given twice")
    empty = sorted(name for name, value in params.items() if not value)
    if empty:
        raise SettingError(f"{_NAME}: {empty[0]} is empty; leave it out")
    return params


def _choose(params: dict[str, str], name: str, choices: tuple[str, ...], default: str | None) -> str | None:
    value = params.get(name, default)
    if value is not None and value not in choices:
        raise SettingError(f"{_NAME}: {name} must be {' or '.join(choices)}")
    return value


def _check_kms_key(params: dict[str, str]) -> str | None:
    if "sse_kms_key_id" in params and params.get("sse") != "aws:kms":
        raise SettingError(f"{_NAME}: sse_kms_key_id needs sse=aws:kms")
    return params.get("sse_kms_key_id")


def _check_endpoint(url: str | None, name: str) -> str | None:
    if url is None:
        return None
    parts = _split(url, name)
    is_plain = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/")
    if not is_plain or parts.query or parts.fragment or "@" in parts.netloc:
        raise SettingError(f"{name} must be http://HOST[:PORT] or https://HOST[:PORT]")
    return f"{parts.scheme}://{parts.netloc}"
