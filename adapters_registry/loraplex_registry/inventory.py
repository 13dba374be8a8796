"""Compares what a database names with what a store holds, to the last byte. Reads only, and blocks.

`Inventory` serves backups and audits of a platform that runs. It reads columns that every revision has, so that an
older database can be looked at before it is upgraded. What is wrong is a `Fault`, never an exception.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError

from loraplex_registry.db.column import Json
from loraplex_registry.errors import MigrationError, SettingError, UnavailableError
from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.file_rule import CONFIG_FILE, TEMPLATE_FILE, WEIGHTS_FILE
from loraplex_registry.peft.spec import MAX_LORA_RANK, BaseSpec, ModuleSpec
from loraplex_registry.storage.file import hash_file
from loraplex_registry.storage.shelf import Shelf, open_shelf
from loraplex_registry.wire.adapter import Manifest
from loraplex_registry.wire.fault import Fault, FaultKind, NamedArtifact, NamedBase, NamedFile

_NO_LIMIT = 1 << 62
_PLACE = re.compile(r"(files|extra)/[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_VERSION = sa.table(
    "adapter_version", *(sa.column(name) for name in ("adapter_id", "number", "kind", "state")),
    sa.column("digest", sa.String), sa.column("files", Json),
)  # fmt: skip
_ADAPTER = sa.table("adapter", *(sa.column(name) for name in ("id", "tenant", "name", "base_id")))
_BASE = sa.table(
    "base",
    *(sa.column(name) for name in ("id", "name", "fingerprint", "weights_digest", "vocab_size")),
    sa.column("modules", Json),
)
_ALIAS = sa.table("alias", sa.column("adapter_id"), sa.column("name"), sa.column("targets", Json))
_IS_KEPT = sa.and_(_VERSION.c.kind == "lora", _VERSION.c.state != "purged")


class Inventory:
    """What the database names and the store holds."""

    def __init__(self, engine: sa.Engine, shelf: Shelf) -> None:
        self._engine = engine
        self._shelf = shelf
        self._bases: dict[str, BaseSpec] = {}

    def find_revision(self) -> str:
        """Return the revision of the schema.

        Raises:
            MigrationError: There is none: it is no database of this program.
        """
        with self._read() as connection:
            if not sa.inspect(connection).has_table("alembic_version"):
                raise MigrationError("It is no database of Loraplex: there is no revision in it")
            return str(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one())

    def serves(self, revision: str) -> bool:
        """Say whether the schema serves a program whose newest revision is this one."""
        query = sa.text("SELECT 1 FROM compatible_revision WHERE revision = :revision")
        with self._read() as connection:
            if not sa.inspect(connection).has_table("compatible_revision"):
                return False
            return connection.execute(query, {"revision": revision}).first() is not None

    def list_bases(self) -> list[NamedBase]:
        """Return the bases that adapters belong to, by name."""
        with self._read() as connection:
            rows = connection.execute(sa.select(_BASE).order_by(_BASE.c.name)).all()
        return [NamedBase(row.name, row.fingerprint, row.weights_digest) for row in rows]

    def list_artifacts(self) -> list[NamedArtifact]:
        """Return every artifact that a version names which is not purged, by digest."""
        query = (
            sa.select(_VERSION, _ADAPTER.c.tenant, _ADAPTER.c.name.label("adapter"), _BASE.c.fingerprint)
            .join(_ADAPTER, _ADAPTER.c.id == _VERSION.c.adapter_id)
            .join(_BASE, _BASE.c.id == _ADAPTER.c.base_id)
            .where(_IS_KEPT)
            .order_by(_VERSION.c.digest, _ADAPTER.c.tenant, _ADAPTER.c.name, _VERSION.c.number)
        )
        with self._read() as connection:
            self._bases = {row.fingerprint: _build_spec(row) for row in connection.execute(sa.select(_BASE))}
            rows = connection.execute(query).all()
        found: dict[str, NamedArtifact] = {}
        for row in rows:
            known = found.get(row.digest, NamedArtifact(row.digest, row.fingerprint, (), ()))
            own = tuple(NamedFile(file["place"], file["size"], file["sha256"]) for file in row.files)
            found[row.digest] = NamedArtifact(
                row.digest,
                row.fingerprint,
                (*known.names, f"{row.tenant}/{row.adapter}@{row.number}"),
                tuple(sorted({*known.files, *own}, key=lambda file: file.place)),
            )
        return list(found.values())

    def is_named(self, digest: str) -> bool:
        """Say whether a version names the artifact now."""
        with self._read() as connection:
            named = connection.execute(sa.select(_VERSION.c.digest).where(_IS_KEPT, _VERSION.c.digest == digest))
            return named.first() is not None

    def find_manifest(self, digest: str) -> Manifest | None:
        """Return the manifest of an artifact, None if it is not there or no manifest of this digest."""
        return self._shelf.find_manifest(digest)

    @contextmanager
    def hold(self, digest: str, files: Mapping[str, int]) -> Iterator[dict[str, Path]]:
        """Have the files of an artifact on disk, by place (mapped to the size expected); absent ones are left out."""
        with self._shelf.hold(digest, files) as paths:
            yield paths

    def find_orphans(self) -> int:
        """Return how many artifacts the store holds that no version names; uploads on their way are among them."""
        named = {artifact.digest for artifact in self.list_artifacts()}
        return sum(digest not in named for digest in self._shelf.list_digests())

    def find_faults(self, artifact: NamedArtifact) -> list[Fault]:
        """Return what is wrong with an artifact that `list_artifacts` returned: nothing, if it can be served."""
        manifest = self.find_manifest(artifact.digest)
        if manifest is None:
            return [Fault("missing", artifact.digest, f"{_names(artifact)}: there is no whole artifact")]
        wanted = list_files(artifact, manifest)
        odd = [file.place for file in wanted if _PLACE.fullmatch(file.place) is None]
        if odd:
            return [Fault("foreign", artifact.digest, f"{_names(artifact)}: {odd[0]!r} is no place in an artifact")]
        with self.hold(artifact.digest, {file.place: file.size for file in wanted}) as paths:
            faults = [fault for file in wanted if (fault := _compare(artifact, file, paths.get(file.place)))]
            return faults or self._judge(artifact, manifest, paths)

    def find_database_faults(self) -> list[Fault]:
        """Return what is wrong with the database itself: pages, keys to other rows, aliases that lead nowhere."""
        try:
            with self._read() as connection:
                return [*_check_sqlite(connection), *_check_aliases(connection)]
        except UnavailableError as error:
            return [Fault("database", "database", error.message)]

    def _judge(self, artifact: NamedArtifact, manifest: Manifest, paths: Mapping[str, Path]) -> list[Fault]:
        """Compute the canonical digest anew, as an engine does before it serves."""
        names = {file.name for file in manifest.files} & {CONFIG_FILE, WEIGHTS_FILE, TEMPLATE_FILE}
        files = {name: paths[f"files/{name}"] for name in sorted(names)}
        base = self._bases[artifact.fingerprint]
        report, plan = check_adapter(files, base, forced_base=True, renders_template=False)
        if plan is None:
            reasons = "; ".join(check.message for check in report.checks if check.verdict == "fail")
            return [Fault("digest", artifact.digest, f"{_names(artifact)}: this program refuses it: {reasons}")]
        if plan.digest != artifact.digest:
            return [Fault("digest", artifact.digest, f"{_names(artifact)}: its bytes have the digest {plan.digest}")]
        return []

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except DatabaseError as error:
            raise UnavailableError(f"The database cannot be read: {error.orig}") from error


@contextmanager
def open_inventory(
    database_url: str, object_store_url: str, scratch: Path | None = None, *, is_still: bool = False
) -> Iterator[Inventory]:
    """Open an inventory; nothing is made or changed, not even a file beside SQLite's.

    Args:
        database_url: As LORAPLEX_DATABASE_URL.
        object_store_url: As LORAPLEX_OBJECT_STORE_URL.
        scratch: Where files of a bucket lie while they are looked at.
        is_still: Nobody writes to the database meanwhile; it may lie on a disk that cannot be written.

    Raises:
        SettingError: One of them is not valid, or there is no such file.
    """
    engine = _create_engine(database_url, is_still=is_still)
    try:
        with closing(open_shelf(object_store_url, scratch)) as shelf:
            yield Inventory(engine, shelf)
    finally:
        engine.dispose()


def list_files(artifact: NamedArtifact, manifest: Manifest) -> list[NamedFile]:
    """Return every file that the artifact should hold: those of its manifest, and those of later uploads."""
    own = {NamedFile(f"files/{file.name}", file.size, file.sha256) for file in manifest.files}
    return sorted(own | set(artifact.files), key=lambda file: (file.place, file.sha256))


def _create_engine(url: str, *, is_still: bool) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise SettingError("LORAPLEX_DATABASE_URL is not a database URL") from error
    if parsed.get_backend_name() != "sqlite":
        return sa.create_engine(parsed, poolclass=sa.NullPool, isolation_level="REPEATABLE READ", hide_parameters=True)
    path = Path(parsed.database or "").absolute()
    if not path.is_file():
        raise SettingError(f"There is no database {path}")
    address = f"file:{quote(str(path))}?mode=ro{'&immutable=1' if is_still else ''}"
    return sa.create_engine("sqlite://", poolclass=sa.NullPool, creator=lambda: _connect_sqlite(address))


def _connect_sqlite(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True)
    # a database that somebody else may have made: what is written in its schema runs nothing
    for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "query_only=ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _build_spec(row: sa.Row[tuple[object, ...]]) -> BaseSpec:
    """The base without limits: an operator may have lowered them since the adapter was taken."""
    return BaseSpec(
        name=row.name,
        accepted_names=(),
        fingerprint=row.fingerprint,
        weights_digest=row.weights_digest,
        vocab_size=row.vocab_size,
        modules=msgspec.convert(row.modules, dict[str, ModuleSpec]),
        max_lora_rank=MAX_LORA_RANK,
        max_saved_bytes=_NO_LIMIT,
    )


def _names(artifact: NamedArtifact) -> str:
    first, *others = artifact.names
    return f"{first} and {len(others)} more" if others else first


def _compare(artifact: NamedArtifact, file: NamedFile, path: Path | None) -> Fault | None:
    subject, about = f"{artifact.digest}/{file.place}", _names(artifact)
    try:
        if path is None:
            return Fault("missing", subject, f"{about}: the file is not there")
        size = path.stat().st_size
        if size != file.size:
            kind: FaultKind = "truncated" if size < file.size else "rotted"
            return Fault(kind, subject, f"{about}: {size} bytes, not {file.size}")
        if hash_file(path) != file.sha256:
            return Fault("rotted", subject, f"{about}: its sha256 is another one")
    except OSError as error:
        return Fault("rotted", subject, f"{about}: it cannot be read: {error.strerror}")
    return None


def _check_sqlite(connection: sa.Connection) -> Iterator[Fault]:
    if connection.dialect.name != "sqlite":
        return
    for (text,) in connection.exec_driver_sql("PRAGMA integrity_check(20)"):
        if text != "ok":
            yield Fault("database", "database", text)
    for table, _, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
        yield Fault("database", "database", f"a row of {table} names one of {parent} that is not there")


def _check_aliases(connection: sa.Connection) -> Iterator[Fault]:
    query = sa.select(_VERSION.c.adapter_id, _VERSION.c.number).where(_VERSION.c.state != "purged")
    there = {(str(row.adapter_id), row.number) for row in connection.execute(query)}
    for alias in connection.execute(sa.select(_ALIAS)):
        for target in alias.targets:
            if (str(alias.adapter_id), target["version"]) not in there:
                lost = f"alias {alias.name} leads to version {target['version']}, which is not there"
                yield Fault("database", "database", lost)
