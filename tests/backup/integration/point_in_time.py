"""A point-in-time restore as docs/backup.md tells it: a real Postgres with archived WAL, a real S3 server.

Not part of `make test`: `make test-restore`. The server is killed with `kill -9` and its data folder thrown away.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from backup_world import ADAPTER, push, running_registry
from databases import EmbeddedPostgres, _plain_env
from loraplex.cli.app import main
from loraplex_registry.wire.digest import artifact_path
from s3_world import BUCKET, S3Server

DATABASE = "loraplex"


class Cluster(EmbeddedPostgres):
    """A Postgres whose write-ahead log is archived."""

    def __init__(self, home: Path, archive: Path) -> None:
        super().__init__(home)
        self._archive = archive
        self.configure(self._data, archive_mode="on", archive_command=f"test ! -f {archive}/%f && cp %p {archive}/%f")

    @property
    def database_url(self) -> str:
        """As LORAPLEX_DATABASE_URL."""
        return self.address(DATABASE).replace("postgresql://", "postgresql+psycopg://")

    def address(self, database: str) -> str:
        """Where a database of it is."""
        return f"{self.url.rpartition('/')[0]}/{database}"

    def configure(self, data: Path, **settings: str) -> None:
        """Set server settings in a data folder."""
        with (data / "postgresql.auto.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def ask(self, statement: str, database: str = "postgres") -> Any:
        """Run one statement and return its first value, if it has one."""
        with psycopg.connect(self.address(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchone()[0] if cursor.description else None  # type: ignore[index]

    def take_base_backup(self, to: Path) -> None:
        """`pg_basebackup`, as the page says."""
        command = [self._binaries / "pg_basebackup", "-d", self.url, "-D", to, "-X", "stream", "-c", "fast"]
        options: dict[str, Any] = {"user": self._user, "env": _plain_env(), "cwd": "/", "capture_output": True}
        done = subprocess.run(command, **options, text=True, check=False)
        assert done.returncode == 0, done.stderr
        done = subprocess.run([self._binaries / "pg_verifybackup", to], **options, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def archive_all(self) -> None:
        """Wait until all that was written is in the archive."""
        wanted = self.ask("SELECT pg_walfile_name(pg_switch_wal())")
        deadline = time.monotonic() + 30
        while (self.ask("SELECT last_archived_wal FROM pg_stat_archiver") or "") < wanted:
            assert time.monotonic() < deadline, "the log is not archived"
            time.sleep(0.1)

    def recover(self, base: Path, target_time: str) -> None:
        """Replace the lost data folder by the base backup, led on by the archive up to `target_time`."""
        shutil.rmtree(self._data)
        shutil.copytree(base, self._data)
        self.configure(
            self._data,
            restore_command=f"cp {self._archive}/%f %p",
            recovery_target_time=target_time,
            recovery_target_action="promote",
        )
        (self._data / "recovery.signal").touch()
        if self._user is not None:
            for path in (self._data, *self._data.rglob("*")):
                shutil.chown(path, self._user)
        self.start()
        deadline = time.monotonic() + 60
        while self.ask("SELECT pg_is_in_recovery()"):
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # Postgres runs as nobody, who cannot enter pytest's folders
    with tempfile.TemporaryDirectory(prefix="lpx-pitr-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        (root / "home").mkdir()
        for name in ("archive", "backups"):
            (root / name).mkdir(mode=0o777)
            (root / name).chmod(0o777)
        server = Cluster(root / "home", root / "archive")
        server.start()
        try:
            yield server
        finally:
            server.kill()


def verify(cluster: Cluster, store: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[int, dict[str, Any]]:
    """`loraplex backup verify` of database and bucket."""
    monkeypatch.setenv("LORAPLEX_DATABASE_URL", cluster.database_url)
    monkeypatch.setenv("LORAPLEX_OBJECT_STORE_URL", store)
    capsys.readouterr()
    code = main(["backup", "verify", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


async def test_a_database_is_put_back_to_a_moment_and_agrees_with_the_bucket(
    cluster: Cluster,
    s3_server: S3Server,
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.ask(f"CREATE DATABASE {DATABASE}")
    base = cluster._archive.with_name("backups") / "base"
    data = tmp_path / "data"
    data.mkdir()
    async with running_registry(data, cluster.database_url, s3_url) as world:
        await push(world, "team-a", 1)
        await push(world, "team-b", 2)
        cluster.take_base_backup(base)
        kept = await push(world, "team-a", 3, promote="always")
        moment = cluster.ask("SELECT clock_timestamp()::text")
        later = await push(world, "team-a", 4, promote="always")
        cluster.ask("DROP TABLE alias, alias_history CASCADE", DATABASE)
        cluster.archive_all()
    cluster.kill()
    cluster.recover(base, moment)

    code, found = verify(cluster, s3_url, monkeypatch, capsys)
    assert (code, found["faults"], found["num_artifacts"], found["num_orphans"]) == (0, [], 3, 1)
    async with running_registry(data, cluster.database_url, s3_url) as world:
        path = ADAPTER.format("team-a")
        versions = (await world.caller("team-a")("GET", f"{path}/versions")).json()["data"]
        assert [(each["version"], each["promoted"]) for each in versions] == [(2, True), (1, False)]
        assert versions[0]["digest"] == kept["digest"] != later["digest"]
        content = await world.caller("team-a")("GET", f"{path}/versions/2/files/adapter_model.safetensors")
        assert content.content == (tmp_path / "adapter-3" / "adapter_model.safetensors").read_bytes()

    client = s3_server.client()
    prefix = s3_url.split("/")[3].partition("?")[0]
    folder = f"{prefix}/{artifact_path(kept['digest'])}/files/"
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=folder)["Contents"]
    client.delete_object(Bucket=BUCKET, Key=listed[0]["Key"])
    client.close()
    code, found = verify(cluster, s3_url, monkeypatch, capsys)
    assert (code, [fault["kind"] for fault in found["faults"]]) == (1, ["missing"])
    assert found["faults"][0]["subject"].startswith(kept["digest"])
