"""Where a one-machine platform keeps what a backup holds, by its settings as `loraplex up` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa

from loraplex.backup.errors import BackupError, UnsupportedPlaceError
from loraplex.keys.files import ADMIN_KEY_FILE, PEPPER_FILE, SIGNING_KEY_FILE
from loraplex.supervisor.base import SPEC_FILE, PulledBase, read_base
from loraplex.supervisor.data_folder import DataFolder
from loraplex.supervisor.errors import UpError
from loraplex_registry.wire.fault import NamedBase
from loraplex_registry.wire.setting import SettingError

SECRET_FILES = (ADMIN_KEY_FILE, PEPPER_FILE, SIGNING_KEY_FILE, "engine.key")
SECRET_SETTINGS = {ADMIN_KEY_FILE: "admin_key", PEPPER_FILE: "key_pepper", SIGNING_KEY_FILE: "signing_key"}
"""Those that an operator may have given by a setting instead; then no file has them."""

_HOW_ELSE = (
    "Take base backups of Postgres, archive its write-ahead log, and keep the bucket's versions for longer than you "
    "want to go back; the database comes first. `loraplex backup verify` compares the two."
)


@dataclass(frozen=True)
class Source:
    """The places of one platform; `database_url` and `object_store_url` as in its settings."""

    folder: DataFolder
    database_url: str
    object_store_url: str
    cache_dir: Path

    @property
    def database(self) -> Path:
        """The SQLite file.

        Raises:
            UnsupportedPlaceError: It is another database.
            BackupError: It is not there.
        """
        try:
            url = sa.make_url(self.database_url)
        except sa.exc.ArgumentError as error:
            raise SettingError("LORAPLEX_DATABASE_URL is not a database URL") from error
        if url.get_backend_name() != "sqlite" or not url.database:
            raise UnsupportedPlaceError(f"The database is {url.get_backend_name()}; this copies SQLite. {_HOW_ELSE}")
        path = Path(url.database).absolute()
        if not path.is_file():
            raise BackupError(
                f"There is no platform in {self.folder.path}: {path} is not there. Name it by --data-dir."
            )
        return path

    def check_objects(self) -> None:
        """Return if the objects lie in a folder.

        Raises:
            UnsupportedPlaceError: They do not.
            BackupError: It is not there.
        """
        parts = urlsplit(self.object_store_url)
        if parts.scheme != "file":
            raise UnsupportedPlaceError(f"The objects lie in a bucket; this copies a folder. {_HOW_ELSE}")
        if not Path(unquote(parts.path)).is_dir():
            raise BackupError(f"There is no {unquote(parts.path)}; name the folder of a platform by --data-dir.")

    def find_bases(self, named: list[NamedBase]) -> list[PulledBase]:
        """Return the folders of these bases in this machine's cache.

        Raises:
            BackupError: One is not there, with these weights.
        """
        found: dict[tuple[str, str], PulledBase] = {}
        for folder in sorted((self.cache_dir / "bases").glob(f"*/{SPEC_FILE}")):
            try:
                base = read_base(folder.parent)
            except UpError:
                continue
            found.setdefault((base.spec.fingerprint, base.spec.weights_digest), base)
        missing = [base.name for base in named if (base.fingerprint, base.weights_digest) not in found]
        if missing:
            raise BackupError(
                f"{', '.join(missing)} is not in {self.cache_dir / 'bases'}. Fetch it with `loraplex base pull`, or "
                "leave --with-base out: a backup names its bases, and they can be fetched after a restore."
            )
        return [found[base.fingerprint, base.weights_digest] for base in named]


def find_source(data_dir: Path, settings: Mapping[str, str]) -> Source:
    """Return the places of the platform in `data_dir`; database and objects may lie elsewhere, by their settings."""
    folder = DataFolder(data_dir)
    return Source(
        folder,
        settings.get("database_url") or folder.database_url,
        settings.get("object_store_url") or folder.object_store_url,
        Path(settings["cache_dir"]).expanduser().absolute(),
    )
