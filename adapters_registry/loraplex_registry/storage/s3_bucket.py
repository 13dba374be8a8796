"""The few requests to an S3 server that the store is made of, below one prefix.

Each write carries a checksum that the server compares. Requests are repeated by botocore, four tries with growing
pauses; connecting may take 2 s and silence 30 s.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from loraplex_registry.errors import StoreUnavailableError
from loraplex_registry.storage.part import SignedPart
from loraplex_registry.storage.s3_address import S3Address
from loraplex_registry.storage.s3_failure import KeyBusyError, translated_failures

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

SINGLE_BYTES = 128 << 20
"""Files up to this size go in one request, whose sha256 is the whole file's."""

PIECE_BYTES = 16 << 20
"""Larger ones go in parts of this size."""

_MAX_PARTS = 10_000
_MAX_TRIES = 4
_PARALLEL = 4
_MAX_KEYS_PER_DELETE = 1000


@dataclass(frozen=True)
class Listed:
    """An object in a listing: key below the prefix, size in bytes, seconds since it was written."""

    key: str
    size: int
    age_s: float


class S3Bucket:
    """Objects by keys below the address's prefix. Safe for threads."""

    def __init__(self, address: S3Address, max_tries: int = _MAX_TRIES) -> None:
        self.address = address
        self._max_tries = max_tries

    @cached_property
    def _client(self) -> S3Client:
        # at its first use: looking for credentials may ask the machine's cloud, which takes its time
        return _connect(self.address, self.address.endpoint, self._max_tries)

    @cached_property
    def _signer(self) -> S3Client:
        return _connect(self.address, self.address.public_endpoint or self.address.endpoint, self._max_tries)

    def close(self) -> None:
        """Close connections."""
        for name in ("_client", "_signer"):
            if name in self.__dict__:
                self.__dict__[name].close()

    def put(self, key: str, content: bytes, *, is_new: bool = False) -> None:
        """Write an object; with `is_new` only if there is none.

        Raises:
            KeyTakenError: There is one.
            StoreUnavailableError: The server does not take it.
        """
        condition: Any = {"IfNoneMatch": "*"} if is_new else {}
        for _ in range(_MAX_TRIES):
            try:
                with translated_failures(is_conditional=True):
                    self._client.put_object(
                        **self._where(key), Body=content, **self._checksum(content), **self._encryption(), **condition
                    )
            except KeyBusyError:
                time.sleep(random.uniform(0.05, 0.5))  # noqa: S311 - no secret
            else:
                return
        raise StoreUnavailableError

    def put_file(self, key: str, source: Path, sha256: str) -> None:
        """Write a file of any size whose sha256 is known; what is in the bucket afterwards is whole.

        Raises:
            StoreUnavailableError: The server does not take it.
        """
        size = source.stat().st_size
        if size > SINGLE_BYTES:
            self._put_in_parts(key, source, size)
            return
        checksum = self._checksum_of_file(source, sha256)
        with source.open("rb") as body, translated_failures():
            self._client.put_object(**self._where(key), Body=body, ContentLength=size, **checksum, **self._encryption())

    def get(self, key: str) -> bytes:
        """Return a small object.

        Raises:
            KeyMissingError: It is not there.
        """
        with translated_failures():
            return self._client.get_object(**self._where(key))["Body"].read()

    def stream(self, key: str, start: int = 0, etag: str | None = None) -> tuple[Any, str]:
        """Return the body of an object from byte `start` on, and its ETag; with `etag` only of that very object.

        Raises:
            KeyMissingError: It is not there.
            KeyTakenError: It is another.
        """
        condition: dict[str, Any] = {"IfMatch": etag} if etag else {}
        if start:
            condition["Range"] = f"bytes={start}-"
        with translated_failures():
            answer = self._client.get_object(**self._where(key), **condition)
            return answer["Body"], answer["ETag"]

    def touch(self, key: str) -> None:
        """Make an object young again by copying it onto itself.

        Raises:
            KeyMissingError: It is not there.
        """
        where: Any = self._where(key)
        with translated_failures():
            self._client.copy_object(**where, CopySource=where, MetadataDirective="REPLACE", **self._encryption())

    def list(self, folder: str) -> Iterator[Listed]:
        """Yield every object whose key begins with `folder`, in order of keys; ages by the server's clock."""
        start = len(self.address.prefix)
        after: dict[str, Any] = {}
        while True:
            with translated_failures():
                page = self._client.list_objects_v2(
                    Bucket=self.address.bucket, Prefix=self.address.prefix + folder, **after
                )
                now = _server_time(page)
                found = [
                    Listed(each["Key"][start:], each["Size"], (now - each["LastModified"]).total_seconds())
                    for each in page.get("Contents", ())
                ]
                after = {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else {}
            yield from found
            if not after:
                return

    def ask_time(self) -> datetime | None:
        """Return the server's clock, None where it does not say; changes nothing.

        Raises:
            StoreUnavailableError: The server does not let this one list the bucket.
        """
        with translated_failures():
            answer = self._client.list_objects_v2(Bucket=self.address.bucket, Prefix=self.address.prefix, MaxKeys=1)
            date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
            return parsedate_to_datetime(date) if date else None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are fine."""
        for start in range(0, len(keys), _MAX_KEYS_PER_DELETE):
            batch = keys[start : start + _MAX_KEYS_PER_DELETE]
            objects: Any = [{"Key": self.address.prefix + key} for key in batch]
            with translated_failures():
                answer = self._client.delete_objects(
                    Bucket=self.address.bucket, Delete={"Objects": objects, "Quiet": True}
                )
            _check_deleted(answer.get("Errors", ()))

    def sign_put(self, key: str, size: int, sha256: str, life_s: int) -> SignedPart:
        """Return how a client writes one object of this very size and content."""
        headers = {"x-amz-checksum-sha256": _base64(bytes.fromhex(sha256))}
        encryption = self._encryption()
        if "ServerSideEncryption" in encryption:
            headers["x-amz-server-side-encryption"] = encryption["ServerSideEncryption"]
        if "SSEKMSKeyId" in encryption:
            headers["x-amz-server-side-encryption-aws-kms-key-id"] = encryption["SSEKMSKeyId"]
        params = {
            **self._where(key),
            **encryption,
            "ContentLength": size,
            "ChecksumSHA256": headers["x-amz-checksum-sha256"],
        }
        expires_at = datetime.now(UTC) + timedelta(seconds=life_s)
        with translated_failures():
            url = self._signer.generate_presigned_url("put_object", Params=params, ExpiresIn=life_s)
        return SignedPart(url, "PUT", headers, expires_at)

    def abort_old_uploads(self, min_age_s: float) -> int:
        """Abort multipart uploads that began longer than `min_age_s` ago, and return how many."""
        with translated_failures():
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.address.bucket, Prefix=self.address.prefix
            )
            old = [
                (each["Key"], each["UploadId"])
                for page in pages
                for each in page.get("Uploads", ())
                if (_server_time(page) - each["Initiated"]).total_seconds() > min_age_s
            ]
            for key, upload in old:
                self._client.abort_multipart_upload(Bucket=self.address.bucket, Key=key, UploadId=upload)
        return len(old)

    def _put_in_parts(self, key: str, source: Path, size: int) -> None:
        with translated_failures():
            kind: Any = {"ChecksumAlgorithm": "SHA256"} if self.address.checksum == "sha256" else {}
            upload = self._client.create_multipart_upload(**self._where(key), **kind, **self._encryption())["UploadId"]
            try:
                self._send_parts(key, upload, source, size)
            except BaseException:
                self._try_abort(key, upload)
                raise

    def _send_parts(self, key: str, upload: str, source: Path, size: int) -> None:
        piece_bytes = max(PIECE_BYTES, -(-size // _MAX_PARTS))
        num_parts = -(-size // piece_bytes)

        def send(number: int) -> dict[str, Any]:
            with source.open("rb") as file:
                file.seek((number - 1) * piece_bytes)
                content = file.read(piece_bytes)
            checksum = self._checksum(content)
            answer = self._client.upload_part(
                **self._where(key), UploadId=upload, PartNumber=number, Body=content, **checksum
            )
            said = {"ChecksumSHA256": checksum["ChecksumSHA256"]} if "ChecksumSHA256" in checksum else {}
            return {"PartNumber": number, "ETag": answer["ETag"], **said}

        with ThreadPoolExecutor(min(_PARALLEL, num_parts)) as pool:
            running = [pool.submit(send, number) for number in range(1, num_parts + 1)]
            try:
                sent: Any = [each.result() for each in running]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._client.complete_multipart_upload(**self._where(key), UploadId=upload, MultipartUpload={"Parts": sent})

    def _try_abort(self, key: str, upload: str) -> None:
        """Free what was sent; `abort_old_uploads` does so later where this fails."""
        with contextlib.suppress(Exception):
            self._client.abort_multipart_upload(**self._where(key), UploadId=upload)

    def _where(self, key: str) -> Any:
        return {"Bucket": self.address.bucket, "Key": self.address.prefix + key}

    def _checksum(self, content: bytes) -> Any:
        if self.address.checksum == "md5":
            return {"ContentMD5": _base64(hashlib.md5(content, usedforsecurity=False).digest())}
        return {"ChecksumSHA256": _base64(hashlib.sha256(content).digest())}

    def _checksum_of_file(self, source: Path, sha256: str) -> Any:
        if self.address.checksum == "md5":
            with source.open("rb") as file:
                return {"ContentMD5": _base64(hashlib.file_digest(file, "md5").digest())}
        return {"ChecksumSHA256": _base64(bytes.fromhex(sha256))}

    def _encryption(self) -> Any:
        address = self.address
        chosen = {"ServerSideEncryption": address.sse, "SSEKMSKeyId": address.sse_kms_key_id}
        return {name: value for name, value in chosen.items() if value}


def _connect(address: S3Address, endpoint: str | None, max_tries: int) -> S3Client:
    with translated_failures():
        session = boto3.session.Session()
        client = session.client(
            "s3",
            endpoint_url=endpoint,
            region_name=address.region or session.region_name or "us-east-1",
            config=Config(
                signature_version="s3v4",
                connect_timeout=2,
                read_timeout=30,
                retries={"mode": "standard", "total_max_attempts": max_tries},
                max_pool_connections=4 * _PARALLEL,
                s3={
                    "addressing_style": "path" if address.path_style else "virtual",
                    # the checksum is signed, so that bodies need not be read and hashed once more
                    "payload_signing_enabled": False,
                },
                # a checksum of ours is on every write; reads are compared with the manifest
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
    if endpoint is not None:
        # AWS tells so of a bucket's region; elsewhere a redirect leads nowhere, and one to itself would never end
        client.meta.events.register_last("before-parameter-build.s3", _follow_no_redirect)
    return client


def _follow_no_redirect(context: dict[str, Any], **_: Any) -> None:
    context.setdefault("s3_redirect", {})["redirected"] = True


def _check_deleted(errors: Sequence[Any]) -> None:
    left = [error for error in errors if error.get("Code") != "NoSuchKey"]
    if left:
        from botocore.exceptions import ClientError

        with translated_failures():
            raise ClientError({"Error": left[0]}, "DeleteObjects")


def _server_time(answer: Any) -> datetime:
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
