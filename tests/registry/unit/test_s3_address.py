"""What a URL of an S3 store may say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loraplex_registry.errors import SettingError
from loraplex_registry.storage.s3_address import S3Address, parse_address
from loraplex_registry.storage.store import create_store


def test_every_parameter_is_understood() -> None:
    url = (
        "s3://my-bucket/a/b/?endpoint=https://s3.example.com:9000/&region=eu-1&path_style=1&sse=aws:kms"
        "&sse_kms_key_id=arn:aws:kms:eu-1:1:key/k&checksum=md5"
    )
    assert parse_address(url, "https://objects.example.com") == S3Address(
        bucket="my-bucket",
        prefix="a/b/",
        endpoint="https://s3.example.com:9000",
        region="eu-1",
        path_style=True,
        sse="aws:kms",
        sse_kms_key_id="arn:aws:kms:eu-1:1:key/k",
        checksum="md5",
        public_endpoint="https://objects.example.com",
    )
    assert parse_address("s3://bucket") == S3Address(bucket="bucket")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://key:secret@bucket/x", "no credentials"),
        ("s3://key@bucket/x", "no credentials"),
        ("s3://", "bucket's name"),
        ("s3://BIG/x", "bucket's name"),
        ("s3://bucket/x#y", "bucket's name"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/../b", "prefix"),
        ("s3://bucket/a%0ab", "prefix"),
        ("s3://bucket?endpont=http://x", "'endpont' is not known"),
        ("s3://bucket?aws_secret_access_key=s3cret", "is not known"),
        ("s3://bucket?region=a&region=b", "twice"),
        ("s3://bucket?region=", "region is empty"),
        ("s3://bucket?endpoint=localhost:9000", "endpoint must be http"),
        ("s3://bucket?endpoint=http://u:p@host", "endpoint must be http"),
        ("s3://bucket?endpoint=http://host/path", "endpoint must be http"),
        ("s3://bucket?path_style=yes", "path_style must be 0 or 1"),
        ("s3://bucket?sse=none", "sse must be AES256 or aws:kms"),
        ("s3://bucket?sse_kms_key_id=k", "needs sse=aws:kms"),
        ("s3://bucket?checksum=crc", "checksum must be sha256 or md5"),
    ],
)
def test_other_urls_are_refused_with_the_reason(url: str, said: str) -> None:
    with pytest.raises(SettingError, match="LORAPLEX_OBJECT_STORE_URL") as caught:
        parse_address(url)
    assert said in caught.value.message
    assert "s3cret" not in caught.value.message
    assert "secret@" not in caught.value.message


def test_the_public_url_is_a_host_and_only_for_s3(tmp_path: Path) -> None:
    for public in ("objects.example.com", "https://x/path", "ftp://x"):
        with pytest.raises(SettingError, match="LORAPLEX_OBJECT_STORE_PUBLIC_URL"):
            parse_address("s3://bucket", public)
    with pytest.raises(SettingError, match="PUBLIC_URL is for s3"):
        create_store(f"file://{tmp_path}/objects", public_url="https://x")


def test_boto3_is_imported_only_for_s3(tmp_path: Path) -> None:
    program = (
        "import sys; from loraplex_registry.storage.store import create_store\n"
        f"create_store('file://{tmp_path}/objects'); assert 'boto3' not in sys.modules\n"
        f"import pathlib; create_store('s3://bucket', pathlib.Path('{tmp_path}/scratch'))\n"
        "assert 'boto3' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
