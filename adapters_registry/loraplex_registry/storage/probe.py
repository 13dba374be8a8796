"""Whether an object store does what Loraplex relies on, found by doing it with one small object and taking that away.

For `loraplex doctor`. Yields one step after another, so that whoever waits no longer has those that were done. Makes no
folder or bucket, and touches nothing that it has not written itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from loraplex_registry.errors import SettingError, StoreUnavailableError
from loraplex_registry.wire.ids import new_uuid

if TYPE_CHECKING:
    from loraplex_registry.storage.s3_bucket import S3Bucket

_CONTENT = b"Loraplex doctor: whether this store keeps what it is given."
_OTHER = b"Loraplex doctor: bytes that were not announced, to be refused."
_LINK_LIFE_S = 60
_PUT_TIMEOUT_S = 5.0
_STALE_S = 3600.0
_FOLDER = "doctor/"
_SKEW_CODE = "RequestTimeTooSkewed"


class StoreStep(NamedTuple):
    """One thing that was tried: `clock` is the store's own, where that was what was asked for."""

    name: str
    verdict: Literal["ok", "warn", "fail", "skip"]
    message: str
    remedy: str = ""
    clock: datetime | None = None
    asked_at: float = 0.0
    """When the clock was asked for, by this machine's (`time.time`), in the middle of question and answer."""


def check_store_url(url: str, public_url: str | None = None) -> None:
    """Return if `create_store` would take these addresses; makes nothing.

    Raises:
        SettingError: One of them is not valid.
    """
    if urlsplit(url).scheme == "s3":
        from loraplex_registry.storage.s3_address import parse_address

        parse_address(url, public_url)
        return
    _find_folder(url)
    if public_url is not None:
        raise SettingError("LORAPLEX_OBJECT_STORE_PUBLIC_URL is for s3:// stores; unset it")


def probe_store(url: str, public_url: str | None = None) -> Iterator[StoreStep]:
    """Try what Loraplex does with the store at `url`.

    Raises:
        SettingError: The URL is not valid.
    """
    check_store_url(url, public_url)
    if urlsplit(url).scheme == "s3":
        yield from _probe_s3(url, public_url)
    else:
        yield from _probe_folder(_find_folder(url))


def _find_folder(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise SettingError("LORAPLEX_OBJECT_STORE_URL must be file:///FOLDER or s3://BUCKET/PREFIX?endpoint=...")
    return Path(unquote(parts.path))


def _probe_folder(root: Path) -> Iterator[StoreStep]:
    if not root.exists():
        yield _judge_absent(root)
        return
    if not root.is_dir():
        yield StoreStep("writes", "fail", f"{root} is no folder.", "Name a folder in LORAPLEX_OBJECT_STORE_URL.")
        return
    # what is left in it when this process is killed, the registry's sweeper takes away
    place = root / "tmp" if (root / "tmp").is_dir() else root
    path = place / f"doctor-{new_uuid().hex}"
    try:
        yield from _try_folder(path)
    finally:
        for left in (path, path.with_suffix(".link")):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)


def _judge_absent(root: Path) -> StoreStep:
    parent = next(folder for folder in root.parents if folder.exists())
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return StoreStep("writes", "skip", f"{root} is not there yet; the first start makes it.")
    return StoreStep(
        "writes", "fail", f"{root} is not there and {parent} lets nobody make it.", f"Make {root}, {_own()}."
    )


def _try_folder(path: Path) -> Iterator[StoreStep]:
    try:
        _write(path)
    except OSError as error:
        why = f"{path.parent} takes no file: {error.strerror}."
        yield StoreStep("writes", "fail", why, f"Mount it writable, with room, and let it {_own()}.")
        return
    yield StoreStep("writes", "ok", f"{path.parent} takes files, and has them on the disk.")
    try:
        is_same = path.read_bytes() == _CONTENT
    except OSError as error:
        yield StoreStep(
            "reads_back", "fail", f"What was written cannot be read: {error.strerror}.", "Replace the disk."
        )
        return
    yield (
        StoreStep("reads_back", "ok", "What was written is read back.")
        if is_same
        else StoreStep("reads_back", "fail", "Other bytes are read than were written.", "Replace the disk.")
    )
    yield _try_exclusive(path)
    try:
        path.unlink()
        path.with_suffix(".link").unlink(missing_ok=True)
    except OSError as error:
        yield StoreStep("deletes", "fail", f"A file cannot be deleted: {error.strerror}.", f"Let the folder {_own()}.")
        return
    yield StoreStep("deletes", "ok", "Files can be deleted.")
    yield StoreStep("presign", "skip", "Parts of large uploads go through the API: this store is a folder.")


def _try_exclusive(path: Path) -> StoreStep:
    """Two makers of one name: a file system that lets both win would mix the files of two uploads."""
    try:
        _write(path)
    except FileExistsError:
        pass
    except OSError as error:
        return StoreStep("conditional_create", "fail", f"It failed: {error.strerror}.", "Use a local file system.")
    else:
        return StoreStep(
            "conditional_create", "fail", "A file was made twice under one name.", "Use a file system with O_EXCL."
        )
    try:
        os.link(path, path.with_suffix(".link"))
    except OSError as error:
        why = f"Of two makers one wins, but there are no hard links ({error.strerror}): uploads are copied."
        return StoreStep(
            "conditional_create", "warn", why, "Use a file system with hard links, or have twice the room."
        )
    return StoreStep("conditional_create", "ok", "Of two makers of one file, one wins.")


def _write(path: Path) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_CONTENT)
        file.flush()
        os.fsync(file.fileno())


def _own() -> str:
    return f"belong to user {os.getuid()}, who runs this"


def _probe_s3(url: str, public_url: str | None) -> Iterator[StoreStep]:
    # boto3 takes 0.2 s to import
    from loraplex_registry.storage.s3_address import parse_address
    from loraplex_registry.storage.s3_bucket import S3Bucket

    bucket = S3Bucket(parse_address(url, public_url), max_tries=1)
    key = f"{_FOLDER}{new_uuid().hex}"
    keys = (key, f"{key}.presigned")
    is_reached = False
    try:
        before = time.time()
        clock = bucket.ask_time()
        is_reached = True
        asked_at = (before + time.time()) / 2
        yield StoreStep("reachable", "ok", f"Bucket {bucket.address.bucket} lets this machine list it.")
        yield StoreStep("clock", "ok", "", clock=clock, asked_at=asked_at)
        yield from _try_bucket(bucket, *keys)
    except StoreUnavailableError as error:
        name = "writes" if is_reached else "reachable"
        yield StoreStep(name, "fail", _shorten(error), _find_remedy(error))
    finally:
        # objects of a doctor that was killed go too
        with contextlib.suppress(StoreUnavailableError):
            bucket.delete([one.key for one in bucket.list(_FOLDER) if one.key in keys or one.age_s > _STALE_S])
        bucket.close()


def _try_bucket(bucket: S3Bucket, key: str, signed_key: str) -> Iterator[StoreStep]:
    from loraplex_registry.storage.s3_failure import KeyMissingError

    bucket.put(key, _CONTENT)
    yield StoreStep("writes", "ok", "It takes objects.")
    try:
        is_same = bucket.get(key) == _CONTENT
    except KeyMissingError:
        is_same = False
    yield (
        StoreStep("reads_back", "ok", "What was written is read back.")
        if is_same
        else StoreStep(
            "reads_back", "fail", "What was written is not what is read.", "Use a store that reads its writes."
        )
    )
    yield _try_condition(bucket, key)
    yield _try_checksum(bucket, key)
    yield from _try_signed(bucket, signed_key)
    bucket.delete([key, signed_key])
    try:
        bucket.get(key)
    except KeyMissingError:
        yield StoreStep("deletes", "ok", "Objects can be deleted.")
    else:
        yield StoreStep("deletes", "fail", "An object is there after it was deleted.", "Allow s3:DeleteObject.")


def _try_condition(bucket: S3Bucket, key: str) -> StoreStep:
    from loraplex_registry.storage.s3_failure import KeyTakenError

    name, remedy = "conditional_create", "Use an S3 server that honours If-None-Match: * on writes, or a newer version."
    try:
        bucket.put(key, _CONTENT, is_new=True)
    except KeyTakenError:
        return StoreStep(name, "ok", "Of two makers of one object, one wins.")
    except StoreUnavailableError as error:
        return StoreStep(name, "fail", f"A conditional write failed: {_shorten(error)}", remedy)
    return StoreStep(name, "fail", "It overwrites an object that was to be made only if there is none.", remedy)


def _try_checksum(bucket: S3Bucket, key: str) -> StoreStep:
    name = "checksum"
    if bucket.address.checksum != "sha256":
        return StoreStep(
            name, "skip", f"checksum={bucket.address.checksum} is in the URL: what is read is verified alone."
        )
    with tempfile.NamedTemporaryFile() as file:
        file.write(_CONTENT)
        file.flush()
        try:
            bucket.put_file(key, Path(file.name), hashlib.sha256(_OTHER).hexdigest())
        except StoreUnavailableError:
            return StoreStep(name, "ok", "It refuses bytes that do not match their sha256.")
    remedy = "Use a server that verifies x-amz-checksum-sha256, or say checksum=md5 in LORAPLEX_OBJECT_STORE_URL."
    return StoreStep(name, "fail", "It took bytes that do not match the sha256 that came with them.", remedy)


def _try_signed(bucket: S3Bucket, key: str) -> Iterator[StoreStep]:
    """Write by presigned URL as a client does, first other bytes than those that were signed for."""
    name = "presign"
    if bucket.address.checksum != "sha256":
        yield StoreStep(name, "skip", "Parts of large uploads go through the API: the URL says checksum=md5.")
        return
    signed = bucket.sign_put(key, len(_CONTENT), hashlib.sha256(_CONTENT).hexdigest(), _LINK_LIFE_S)
    host = urlsplit(signed.url).netloc
    remedy = "Set LORAPLEX_OBJECT_STORE_PUBLIC_URL to the address by which clients reach the store."
    try:
        tampered = _put(signed.url, _OTHER[: len(_CONTENT)], signed.headers)
        whole = _put(signed.url, _CONTENT, signed.headers)
    except (OSError, ValueError) as error:
        yield StoreStep(name, "fail", f"Nothing answers at {host}: {type(error).__name__}.", remedy)
        return
    if tampered < 400:
        why = f"By a presigned URL {host} took other bytes than those that were signed for."
        yield StoreStep(name, "fail", why, "Use a server that verifies x-amz-checksum-sha256 and Content-Length.")
    elif whole >= 400:
        yield StoreStep(name, "fail", f"A presigned write to {host} was answered {whole}.", remedy)
    else:
        yield StoreStep(name, "ok", f"{host} takes presigned writes, and only of the bytes that were signed for.")


def _put(url: str, content: bytes, headers: dict[str, str]) -> int:
    request = urllib.request.Request(url, content, headers, method="PUT")  # noqa: S310 - of the configured store
    try:
        with urllib.request.urlopen(request, timeout=_PUT_TIMEOUT_S) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def _shorten(error: StoreUnavailableError) -> str:
    return f"{error.message.partition(';')[0]}."


def _find_remedy(error: StoreUnavailableError) -> str:
    text = error.message
    if _SKEW_CODE in text:
        return "Set this machine's clock, or the store's: they differ by more than 15 minutes."
    if "credentials" in text:
        return "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that they may list, read, write and delete."
    if "bucket does not exist" in text:
        return "Create the bucket, or correct its name in LORAPLEX_OBJECT_STORE_URL."
    return "Check endpoint and region in LORAPLEX_OBJECT_STORE_URL, the network, and that the server runs."
