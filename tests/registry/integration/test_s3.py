"""The S3 store on a real server: what the server refuses, what becomes of a server that dies, what is put right."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from botocore.exceptions import ClientError

from conftest import skip_or_fail
from loraplex_registry.errors import StoreUnavailableError
from loraplex_registry.storage.s3 import S3Store
from loraplex_registry.storage.s3_address import parse_address
from loraplex_registry.storage.s3_bucket import S3Bucket
from loraplex_registry.storage.s3_failure import KeyTakenError
from loraplex_registry.storage.store import Part, PartPlace, SignedPart
from loraplex_registry.wire.adapter import Manifest, ManifestFile
from loraplex_registry.wire.digest import artifact_path
from s3_world import BUCKET, SECRET_KEY, S3Server, S3Unavailable, running_s3

DIGEST = "sha256:" + "ef" * 32
UPLOAD = "upl_" + "c" * 26
CONTENT = b"the bytes of a part"
PIECE_BYTES = 5 << 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in several parts need not be large; 5 MiB is the least that a server takes."""
    for name in ("SINGLE_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(f"loraplex_registry.storage.s3_bucket.{name}", PIECE_BYTES)


@pytest.fixture
def store(s3_url: str, tmp_path: Path) -> Iterator[S3Store]:
    store = S3Store(parse_address(s3_url), tmp_path / "scratch")
    yield store
    store.close()


def open_store(server: S3Server, tmp_path: Path, url: str | None = None) -> S3Store:
    return S3Store(parse_address(url or server.url()), tmp_path / "scratch")


def stage(tmp_path: Path, **contents: bytes) -> tuple[Manifest, dict[str, Path]]:
    files = {name: tmp_path / f"{name}-{time.monotonic_ns()}" for name in contents}
    for name, content in contents.items():
        files[name].write_bytes(content)
    described = tuple(ManifestFile(name, len(c), hashlib.sha256(c).hexdigest()) for name, c in contents.items())
    return Manifest(digest=DIGEST, base_fingerprint="f", files=described, config={}), files


def part_of(content: bytes, number: int = 0) -> Part:
    return Part(PartPlace(0, number), len(content), hashlib.sha256(content).hexdigest())


def sign(store: S3Store, content: bytes = CONTENT, number: int = 0, life_s: int = 60) -> SignedPart:
    signed = store.sign(UPLOAD, part_of(content, number), life_s)
    assert signed is not None
    return signed


def send(signed: SignedPart, content: bytes, **changes: str) -> int:
    url = changes.pop("url", signed.url)
    return httpx.request(signed.method, url, headers=signed.headers | changes, content=content).status_code


def test_a_client_sends_a_part_by_its_url(store: S3Store, tmp_path: Path) -> None:
    assert send(sign(store), CONTENT) == 200
    assert send(sign(store), CONTENT) == 200, "again"
    assert send(sign(store, b"second", 1), b"second") == 200
    assert store.list(UPLOAD) == {PartPlace(0, 0): len(CONTENT), PartPlace(0, 1): 6}
    whole = CONTENT + b"second"
    found = store.join(UPLOAD, [part_of(CONTENT), part_of(b"second", 1)], tmp_path / "whole")
    assert found == hashlib.sha256(whole).hexdigest()
    assert (tmp_path / "whole").read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"The bytes of a part", CONTENT[:-1], CONTENT + b"!", b""], ids=["other", "shorter", "longer", "none"]
)
def test_the_server_refuses_other_bytes_than_signed(store: S3Store, content: bytes) -> None:
    assert send(sign(store), content) in (400, 403)
    assert store.list(UPLOAD) == {}


def test_a_url_serves_one_part_only_and_ends(store: S3Store) -> None:
    signed = sign(store)
    assert send(signed, CONTENT, url=signed.url.replace("/0.0?", "/0.1?")) == 403
    assert send(signed, CONTENT, url=signed.url.replace("Expires=60", "Expires=600")) == 403
    other = b"tHe bytes of a part"
    checksum = sign(store, other).headers["x-amz-checksum-sha256"]
    assert send(signed, other, **{"x-amz-checksum-sha256": checksum}) == 403
    headers = {name: value for name, value in signed.headers.items() if name != "x-amz-checksum-sha256"}
    assert httpx.put(signed.url, headers=headers, content=other).status_code in (400, 403)
    expiring = sign(store, life_s=1)
    time.sleep(1.2)
    assert send(expiring, CONTENT) == 403
    assert store.list(UPLOAD) == {}


def test_signed_urls_name_the_public_host_and_no_secret(s3_url: str, tmp_path: Path) -> None:
    address = parse_address(s3_url, "https://objects.example.com")
    store = S3Store(address, tmp_path)
    signed = sign(store)
    store.close()
    assert signed.url.startswith(f"https://objects.example.com/{BUCKET}/{address.prefix}staging/{UPLOAD}/0.0?")
    assert SECRET_KEY not in signed.url
    assert "content-length" in signed.url.lower()
    assert "x-amz-checksum-sha256" in signed.url.lower()


def test_the_server_compares_checksums_of_writes(store: S3Store, tmp_path: Path, s3_server: S3Server) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    with pytest.raises(StoreUnavailableError, match="it answers BadDigest"):
        store.bucket.put_file("key", tmp_path / "file", hashlib.sha256(b"other").hexdigest())
    assert list(store.bucket.list("")) == []


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_bad_credentials_are_said_without_them(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(name, "of-somebody-else")
    store = S3Store(parse_address(s3_url), tmp_path)
    with pytest.raises(StoreUnavailableError, match="refuses this server's credentials") as caught:
        store.put(*stage(tmp_path, config=b"{}"))
    store.close()
    assert "of-somebody-else" not in str(caught.value) + caplog.text


def test_an_absent_bucket_and_absent_credentials_are_said(
    s3_server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_server, tmp_path, s3_server.url(bucket="nobodys-bucket"))
    with pytest.raises(StoreUnavailableError, match="its bucket does not exist"):
        store.put(*stage(tmp_path, config=b"{}"))
    store.close()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(s3_server, tmp_path)
    with pytest.raises(StoreUnavailableError, match="no credentials"):
        store.find_manifest(DIGEST)
    store.close()


def test_a_server_that_is_not_there_costs_seconds(s3_url: str, tmp_path: Path) -> None:
    store = S3Store(parse_address("s3://bucket/x?endpoint=http://127.0.0.1:9&path_style=1"), tmp_path)
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        store.find_manifest(DIGEST)
    store.close()
    assert time.monotonic() - began < 60


def test_large_files_go_in_parts_and_come_back(store: S3Store, tmp_path: Path) -> None:
    content = os.urandom(2 * PIECE_BYTES + 12345)
    manifest, files = stage(tmp_path, weights=content)
    store.put(manifest, files)
    with store.open(DIGEST, "files/weights") as opened:
        assert hashlib.file_digest(opened, "sha256").hexdigest() == manifest.files[0].sha256
    assert store.find_manifest(DIGEST) == manifest


def test_one_of_eight_creates_a_key(store: S3Store) -> None:
    barrier = threading.Barrier(8)

    def create(number: int) -> int | None:
        barrier.wait()
        try:
            store.bucket.put("key", b"%d" % number, is_new=True)
        except KeyTakenError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        (winner,) = [number for number in pool.map(create, range(8)) if number is not None]
    assert store.bucket.get("key") == b"%d" % winner


def test_a_key_that_another_is_writing_is_waited_for(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, num_busy = store.bucket._client.put_object, 0

    def put_object(**asked: object) -> object:
        nonlocal num_busy
        num_busy += 1
        if num_busy <= 2:
            raise ClientError({"Error": {"Code": "ConditionalRequestConflict"}}, "PutObject")
        return plain(**asked)  # type: ignore[arg-type]

    monkeypatch.setattr(store.bucket._client, "put_object", put_object)
    store.bucket.put("key", b"1", is_new=True)
    assert (store.bucket.get("key"), num_busy) == (b"1", 3)


def test_damage_is_no_artifact_and_a_whole_copy_heals_it(store: S3Store, tmp_path: Path) -> None:
    folder = artifact_path(DIGEST)
    manifest, files = stage(tmp_path, config=b"{}", weights=b"1234")
    file_key = f"{folder}/files/{manifest.files[1].sha256}"
    store.put(manifest, files)
    for damage in (
        lambda: store.bucket.put(f"{folder}/manifest.json", b"{"),
        lambda: store.bucket.delete([f"{folder}/manifest.json"]),
        lambda: store.bucket.delete([file_key]),
        lambda: store.bucket.put(file_key, b"123"),
    ):
        damage()
        assert store.find_manifest(DIGEST) is None
        store.put(manifest, files)
        assert store.find_manifest(DIGEST) == manifest


def test_putting_again_makes_an_artifact_young(store: S3Store, tmp_path: Path) -> None:
    staged = stage(tmp_path, config=b"{}")
    store.put(*staged)
    time.sleep(1.6)
    aged = store.find_age_s(DIGEST)
    assert aged is not None
    assert aged >= 1
    store.put(*staged)
    young = store.find_age_s(DIGEST)
    assert young is not None
    assert young < aged
    assert store.find_manifest(DIGEST) == staged[0]


def test_listings_go_on_behind_their_first_page(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client = store.bucket._client
    plain = client.list_objects_v2
    monkeypatch.setattr(client, "list_objects_v2", lambda **asked: plain(**asked, MaxKeys=2))
    for number in range(5):
        store.bucket.put(f"staging/{UPLOAD}/0.{number}", b"x")
    assert len(store.list(UPLOAD)) == 5
    store.drop(UPLOAD)
    assert store.list(UPLOAD) == {}


def test_what_was_left_half_sent_is_aborted_in_time(store: S3Store) -> None:
    client = store.bucket._client
    key = f"{store.bucket.address.prefix}sha256/half"
    client.create_multipart_upload(Bucket=BUCKET, Key=key)
    assert store.sweep_staging(3600) == 0
    assert store.sweep_staging(-5) == 1
    assert store.sweep_staging(-5) == 0


def test_reading_goes_on_where_a_connection_broke(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(5 << 20)
    store.put(*stage(tmp_path, weights=content))
    stream, num_opened = S3Bucket.stream, 0

    def breaking(bucket: S3Bucket, *args: object) -> tuple[object, str]:
        nonlocal num_opened
        num_opened += 1
        body, etag = stream(bucket, *args)  # type: ignore[arg-type]
        return (_Breaking(body) if num_opened <= 2 else body), etag

    monkeypatch.setattr(S3Bucket, "stream", breaking)
    with store.open(DIGEST, "files/weights") as opened:
        assert opened.read() == content
    assert num_opened == 3


class _Breaking:
    """A body whose connection dies after 2 MiB."""

    def __init__(self, body: object) -> None:
        self._body = body
        self._left = 2 << 20

    def read(self, size: int) -> bytes:
        from botocore.exceptions import ReadTimeoutError

        if self._left <= 0:
            raise ReadTimeoutError(endpoint_url="http://x")
        piece: bytes = self._body.read(min(size, self._left))  # type: ignore[attr-defined]
        self._left -= len(piece)
        return piece

    def close(self) -> None:
        self._body.close()  # type: ignore[attr-defined]


def test_encryption_is_asked_for_each_object(s3_server: S3Server, s3_url: str, tmp_path: Path) -> None:
    store = open_store(s3_server, tmp_path, s3_server.url(sse="AES256"))
    store.put(*stage(tmp_path, config=b"{}", weights=os.urandom(PIECE_BYTES + 1)))
    assert send(sign(store), CONTENT) == 200
    assert sign(store).headers["x-amz-server-side-encryption"] == "AES256"
    client, prefix = store.bucket._client, store.bucket.address.prefix
    keys = [each.key for each in store.bucket.list("")]
    assert len(keys) == 4
    for key in keys:
        assert client.head_object(Bucket=BUCKET, Key=prefix + key).get("ServerSideEncryption") == "AES256", key
    store.close()


def test_a_store_of_md5_compares_too_and_signs_nothing(s3_server: S3Server, s3_url: str, tmp_path: Path) -> None:
    store = open_store(s3_server, tmp_path, s3_server.url(checksum="md5"))
    manifest, files = stage(tmp_path, config=b"{}", weights=os.urandom(PIECE_BYTES + 1))
    store.put(manifest, files)
    assert store.find_manifest(DIGEST) == manifest
    assert store.sign(UPLOAD, part_of(CONTENT), 60) is None
    store.close()


def test_killing_the_server_in_mid_upload_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with running_s3() as server:
            _kill_and_look(server, tmp_path, monkeypatch)
    except S3Unavailable as reason:
        skip_or_fail("s3", str(reason))


def _kill_and_look(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    store = open_store(server, tmp_path)
    acknowledged = stage(tmp_path, config=b"{}")
    store.put(*acknowledged)
    manifest, files = stage(tmp_path, weights=os.urandom(6 * PIECE_BYTES))
    manifest = Manifest(digest=DIGEST.replace("ef", "01"), base_fingerprint="f", files=manifest.files, config={})
    plain, num_sent = store.bucket._client.upload_part, 0

    def upload_part(**asked: object) -> object:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 4:
            server.kill()
        return plain(**asked)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(store.bucket._client, "upload_part", upload_part)
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            store.put(manifest, files)
    server.start()
    server.await_bucket()
    assert store.find_manifest(manifest.digest) is None
    assert [digest for digest, _ in store.list_artifacts()] == [DIGEST]
    assert store.find_manifest(DIGEST) == acknowledged[0]
    store.put(manifest, files)
    assert store.find_manifest(manifest.digest) == manifest
    with store.open(manifest.digest, "files/weights") as opened:
        assert hashlib.file_digest(opened, "sha256").hexdigest() == manifest.files[0].sha256
    store.sweep_staging(-5)
    assert store.sweep_staging(-5) == 0, "what was half sent is gone"
    store.close()
