"""Fuzz targets of the registry: what uploads bring, what requests ask for, what an S3 server answers, identities."""

from __future__ import annotations

import base64
import functools
import json
import os
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from litestar import Request

from fuzz_target import JSON_WORDS, Target, run_async, try_each
from loraplex_registry.adapters.page import parse_number
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.api.adapters import AdapterPatch
from loraplex_registry.api.aliases import NewTargets
from loraplex_registry.api.bases import NewBase
from loraplex_registry.api.reading import read_json, read_page_order, read_precondition
from loraplex_registry.api.upload import build_large_order, build_order, read_boundary, read_length
from loraplex_registry.errors import ArtifactError, RegistryError, SettingError
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.storage.s3_address import S3Address, parse_address
from loraplex_registry.storage.s3_bucket import S3Bucket
from loraplex_registry.storage.s3_failure import KeyMissingError, KeyTakenError
from loraplex_registry.uploads.announcement import UploadAnnouncement, check_announcement, cut
from loraplex_registry.uploads.receive import receive
from loraplex_registry.wire import client as artifact_client
from loraplex_registry.wire.identity import (
    ROLES,
    Identity,
    TokenError,
    TokenSigner,
    TokenVerifier,
    generate_signing_key,
)

_DIGEST = "sha256:" + "a" * 64
_TENANT = TenantRef("id", "team")
_ADMIN = Identity(role="admin", tenant_id=None, tenant=None, scopes=(), key_id="k", actor="a", request_id="r")
_SETTINGS = RegistrySettings(database_url="sqlite+aiosqlite://", object_store_url="file:///x")
_BODIES = (AdapterPatch, NewTargets, NewBase, UploadAnnouncement)
_HEADERS = ("if-match", "if-none-match", "idempotency-key", "content-type", "content-length", "content-encoding")


def build_request(query: bytes = b"", headers: list[tuple[bytes, bytes]] | None = None, body: bytes = b"") -> Any:
    """A request as the server hands it to a route."""

    async def receive_body() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "query_string": query,
        "headers": headers or [],
        "state": {},
        "path_params": {},
        "route_handler": SimpleNamespace(resolve_request_max_body_size=lambda: 1 << 20),
    }
    request: Any = Request(scope, receive_body)  # type: ignore[arg-type]
    return request


def split_request(data: bytes, names: tuple[str, ...]) -> Any:
    """A request from lines: the query, then a value for each header; empty ones are absent."""
    query, *values = data.split(b"\n")
    headers = [(name.encode(), value) for name, value in zip(names, values, strict=False) if value]
    return build_request(query, headers)


def fuzz_multipart(data: bytes) -> None:
    """The first byte says how large the pieces are in which a body arrives."""
    size = data[0] + 1 if data else 1

    async def body() -> AsyncIterator[bytes]:
        for start in range(1, len(data), size):
            yield data[start : start + size]

    with tempfile.TemporaryDirectory() as folder:
        files = run_async(receive(body(), "b", Path(folder), 1 << 20))
        assert all(file.path.stat().st_size == file.size for file in files.values())
        assert len(list(Path(folder).iterdir())) == len(files)


def fuzz_registry_request(data: bytes) -> None:
    """Query and headers of an upload, an alias, a list: each read by all who read such things."""
    request = split_request(data, _HEADERS)
    reads = (
        lambda: build_order(request, _TENANT, "a", _ADMIN, _SETTINGS),
        lambda: build_large_order(request, _TENANT, "a", _ADMIN),
        lambda: read_precondition(request),
        lambda: read_boundary(request),
        lambda: read_length(request, _SETTINGS),
        lambda: read_page_order(request).after(parse_number),
        lambda: read_page_order(request).after(uuid.UUID),
    )
    try_each(reads, (RegistryError,))


def fuzz_registry_body(data: bytes) -> None:
    """The first byte says whose body the rest is."""
    kind = _BODIES[data[0] % len(_BODIES)] if data else AdapterPatch
    headers = [(b"content-type", b"application/json")]
    found: Any = run_async(read_json(build_request(headers=headers, body=data[1:]), kind))
    if isinstance(found, UploadAnnouncement):
        check_announcement(found)
        assert sum(part.size for part in cut(found.files)) == found.size_bytes
    if isinstance(found, NewBase):
        found.build_spec()


@functools.cache
def _signer() -> TokenSigner:
    return TokenSigner(generate_signing_key())


def fuzz_token(data: bytes) -> None:
    """What stands behind `Bearer`; nothing that our key did not sign is an identity."""
    text = data.decode("latin-1")
    good = _signer().sign(_ADMIN, "engine")
    if text.startswith("G"):
        # parts of a good one, with others in between
        parts = dict(zip("HBS", good.split("."), strict=True))
        text = "".join(parts.get(char, char) for char in text[1:])
    identity = TokenVerifier([_signer().public_pem], "engine").verify(text)
    assert identity == _ADMIN, "another identity than the one that was signed"
    # base64 has several spellings of the same bytes
    assert _bare(text) == _bare(good)


def _bare(token: str) -> list[bytes]:
    return [base64.urlsafe_b64decode(part + "==") for part in token.split(".")]


def fuzz_claims(data: bytes) -> None:
    """What a key of ours signed without looking."""
    head = _signer()._head
    signed = b"%b.%b" % (head, base64.urlsafe_b64encode(data).rstrip(b"="))
    signature = base64.urlsafe_b64encode(_signer()._key.sign(signed)).rstrip(b"=")
    token = b"%b.%b" % (signed, signature)
    identity = TokenVerifier([_signer().public_pem], "engine").verify(token.decode("latin-1"))
    assert identity.role in ROLES


def fuzz_manifest(data: bytes) -> None:
    """What a registry tells an engine's loader of an artifact."""
    manifest = artifact_client._read_manifest(data, _DIGEST)
    assert manifest.digest == _DIGEST


class _Answers:
    """What botocore asks in place of a connection."""

    def __init__(self, status: int, body: bytes) -> None:
        self._status, self._body = status, body

    def send(self, request: Any) -> Any:
        from botocore.awsrequest import AWSResponse, HeadersDict

        headers = HeadersDict(
            {"content-type": "application/xml", "etag": '"e"', "content-length": str(len(self._body))}
        )
        raw: Any = _Raw(self._body)
        return AWSResponse(request.url, self._status, headers, raw)

    def close(self) -> None:
        pass


class _Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: Any, **__: Any) -> Any:
        yield self._body

    def read(self, *_: Any, **__: Any) -> bytes:
        body, self._body = self._body, b""
        return body


@functools.cache
def _bucket() -> S3Bucket:
    from loraplex_registry.storage import s3_bucket

    address = S3Address(bucket="bucket", endpoint="http://127.0.0.1:1", path_style=True)
    bucket = S3Bucket(address)
    with mock.patch.dict(os.environ, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}):
        bucket.__dict__["_client"] = s3_bucket._connect(address, address.endpoint, 1)
    return bucket


def fuzz_s3(data: bytes) -> None:
    """The XML of an S3 server: lists, errors, what a deletion says. The first byte chooses question and status."""
    bucket, choice = _bucket(), data[0] if data else 0
    status = (200, 404, 403, 500, 409, 301)[choice // 8 % 6]
    bucket._client._endpoint.http_session = _Answers(status, data[1:])  # type: ignore[attr-defined]
    ask = (
        lambda: next(bucket.list("x"), None),
        lambda: bucket.get("x"),
        lambda: bucket.delete(["x"]),
        lambda: bucket.touch("x"),
        lambda: bucket.abort_old_uploads(1.0),
        lambda: bucket.put("x", b"y", is_new=True),
    )[choice % 6]
    ask()


def fuzz_s3_address(data: bytes) -> None:
    """LORAPLEX_OBJECT_STORE_URL and the public one beside it."""
    url, _, public = data.decode("utf-8", "replace").partition("\n")
    address = parse_address(url, public or None)
    assert ".." not in address.prefix.split("/")


_LIST = b"""<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken><Contents>
<Key>x/y</Key><Size>3</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents></ListBucketResult>"""
_ERROR = b"<Error><Code>NoSuchKey</Code><Message>m</Message></Error>"
_DELETED = b"<DeleteResult><Error><Key>x</Key><Code>AccessDenied</Code></Error></DeleteResult>"
_UPLOADS = b"""<ListMultipartUploadsResult><Upload><Key>k</Key><UploadId>u</UploadId>
<Initiated>2020-01-01T00:00:00Z</Initiated></Upload></ListMultipartUploadsResult>"""
_PART = b'--b\r\nContent-Disposition: form-data; name="files"; filename="adapter_config.json"\r\n\r\n{}\r\n'
_WEIGHTS = _PART.replace(b"adapter_config.json", b"adapter_model.safetensors")
_ANNOUNCED = {
    "files": [
        {"name": name, "size": 1, "sha256": "a" * 64, "part_size": 8 << 20, "part_sha256": ["a" * 64]}
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
}
_NEW_BASE = {
    "name": "b",
    "fingerprint": "f",
    "modules": {"m": [1, 2], "n": {"out_features": 1, "in_features": 2}},
    "vocab_size": 9,
}
REGISTRY_TARGETS = (
    Target(
        "multipart",
        fuzz_multipart,
        (b"\x10" + _PART + _WEIGHTS + b"--b--\r\n", b"\xff" + _PART + b"--b--"),
        (RegistryError,),
        words=(b"--b", b"\r\n\r\n", b'filename="', b"filename*=", b"; ", b"Content-Disposition: ", b"\\"),
    ),
    Target(
        "registry_request",
        fuzz_registry_request,
        (
            b'promote=always&wait=30&dry_run=true\n"3"\n*\nkey\nmultipart/form-data; boundary=b\n12\n',
            b'limit=5&cursor=MTI=\n"1", W/"2"\n\n\napplication/json',
        ),
        (RegistryError,),
        words=(b"%00", b"&", b"=", b'"', b"W/", b", "),
    ),
    Target(
        "registry_body",
        fuzz_registry_body,
        (
            b'\x00{"is_default": true, "limits": {"requests_per_minute": 5}}',
            b'\x01{"targets": [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]}',
            b"\x02" + json.dumps(_NEW_BASE).encode(),
            b"\x03" + json.dumps(_ANNOUNCED).encode(),
        ),
        (RegistryError,),
        words=JSON_WORDS,
    ),
    Target(
        "identity_token",
        fuzz_token,
        (
            b"GH.B.S",
            b"GH.B.",
            b"eyJhbGciOiJub25lIn0.e30.",
            b"GH.B.S.x",
            b"G" + base64.urlsafe_b64encode(b"[" * 600) + b".B.S",
        ),
        (TokenError,),
        words=(b".", b"H", b"B", b"S", b"=="),
    ),
    Target(
        "identity_claims",
        fuzz_claims,
        (
            json.dumps(
                msgspec.to_builtins(_ADMIN) | {"jti": "r", "aud": "engine", "iat": 1, "exp": 99999999999}
            ).encode(),
            b'{"jti": "r", "aud": ["engine"], "iat": 1, "exp": 1e999}',
        ),
        (TokenError,),
        words=JSON_WORDS,
    ),
    Target(
        "artifact_manifest",
        fuzz_manifest,
        (
            json.dumps(
                {
                    "digest": _DIGEST,
                    "base_fingerprint": "f",
                    "files": [{"name": "a", "size": 1, "sha256": "b"}],
                    "config": {},
                }
            ).encode(),
        ),
        (ArtifactError,),
        words=JSON_WORDS,
    ),
    Target(
        "s3_answer",
        fuzz_s3,
        (
            b"\x00" + _LIST,
            b"\x09" + _ERROR,
            b"\x02" + _DELETED,
            b"\x04" + _UPLOADS,
            b"\x0d" + _ERROR.replace(b"NoSuchKey", b"PreconditionFailed"),
            b"\x03<CopyObjectResult><ETag>e</ETag></CopyObjectResult>",
        ),
        (RegistryError, KeyMissingError, KeyTakenError),
        words=(b"<", b"/>", b"<Contents>", b"<!DOCTYPE x [<!ENTITY a 'b'>]>", b"&a;", b"<![CDATA["),
    ),
    Target(
        "s3_address",
        fuzz_s3_address,
        (
            b"s3://bucket/prefix?endpoint=http://h:9000&path_style=1",
            b"s3://b-2/p?sse=aws:kms&sse_kms_key_id=k\nhttps://public",
        ),
        (SettingError,),
        words=(b"s3://", b"?", b"&", b"=", b"[", b"]", b"@", b"#", b":"),
    ),
)
