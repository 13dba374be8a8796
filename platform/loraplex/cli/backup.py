"""`loraplex backup`: copies of a one-machine platform, and the comparison of any platform's database with its store."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from loraplex.cli.example import examples
from loraplex.cli.output import AsJson, done, print_json, print_table, progress_bar, say
from loraplex.cli.upload_bar import show_size

if TYPE_CHECKING:
    from loraplex.backup.manifest import BackupManifest
    from loraplex.backup.source import Source
    from loraplex_registry.wire.fault import Fault

app = App(
    name="backup",
    help="Back up a platform of one machine while it runs, verify a backup or a platform, restore it.",
    help_format="plaintext",
    help_epilogue=examples(
        "loraplex backup create /backups/monday",
        "loraplex backup verify /backups/monday",
        "loraplex backup restore /backups/monday --data-dir ./data",
    ),
)
DataDir = Annotated[
    Path | None,
    Parameter(name="--data-dir", help="A platform's folder; default LORAPLEX_DATA_DIR, else ~/.local/share/loraplex."),
]


@app.command(
    help_epilogue=examples(
        "loraplex backup create /backups/monday", "loraplex backup create --data-dir ./data --without-secrets --json"
    )
)
def create(
    to: Path | None = None,
    /,
    *,
    data_dir: DataDir = None,
    without_secrets: Annotated[bool, Parameter(negative=())] = False,
    with_base: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> int:
    """Copy a platform's database and adapters, while it runs or not, into a new folder, and verify the copy.

    The folder holds the platform's secrets, without which no API key works after a restore: keep it as safe.
    The exit code is 1 if the platform itself has damaged adapters: the backup is made without them, and names them.

    Args:
        to: Folder to make; default loraplex-backup-TIME here.
        data_dir: The platform's folder.
        without_secrets: Leave out admin key, pepper, signing and engine key; keep them elsewhere.
        with_base: Copy the base models too, which are else only named.
        as_json: Print JSON for programs.
    """
    from loraplex.backup.create import create as run

    source, settings = _find_source(data_dir)
    place = (to or Path(time.strftime("loraplex-backup-%Y%m%dT%H%M%SZ", time.gmtime()))).absolute()
    with _Bar() as bar:
        manifest = run(source, place, bar, with_secrets=not without_secrets, with_base=with_base)
    missing = _list_missing_secrets(manifest, settings)
    if as_json:
        print_json(_describe(place, manifest, ()) | {"secrets_elsewhere": missing})
        return 1 if manifest.damaged else 0
    _say_made(place, manifest, missing, with_secrets=not without_secrets)
    _show_faults(manifest.damaged, title="Damaged in the platform, and not in the backup")
    return 1 if manifest.damaged else 0


@app.command(
    help_epilogue=examples(
        "loraplex backup verify /backups/monday",
        "loraplex backup verify                         # this machine's platform",
        "LORAPLEX_DATABASE_URL=postgresql+psycopg://... LORAPLEX_OBJECT_STORE_URL=s3://... loraplex backup verify",
    )
)
def verify(backup: Path | None = None, /, *, data_dir: DataDir = None, as_json: AsJson = False) -> int:
    """Look at every byte of a backup; without one, of the platform that the settings name, while it runs.

    Files are compared with their sha256, adapters with their digest, the database with its rules. Nothing is written.
    The exit code is 1 if anything is missing, truncated, rotted or, in a backup, not named.

    Args:
        backup: The backup's folder; without one, database and store of LORAPLEX_DATABASE_URL and
            LORAPLEX_OBJECT_STORE_URL are compared, be they Postgres and S3 or the folder of one machine.
        data_dir: The platform's folder.
        as_json: Print JSON for programs.
    """
    return _audit(data_dir, as_json=as_json) if backup is None else _verify(backup, as_json=as_json)


@app.command(
    help_epilogue=examples(
        "loraplex backup restore /backups/monday --data-dir ./data",
        "loraplex up --data-dir ./data --port 8081     # try it beside the platform that runs",
    )
)
def restore(backup: Path, /, *, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Make a platform's folder from a backup, after verifying it; the folder must be empty or not there.

    An older backup is upgraded to this program; one whose database has left this program behind is refused. It is done
    whole or not at all.

    Args:
        backup: The backup's folder.
        data_dir: The folder to make.
        as_json: Print JSON for programs.
    """
    from loraplex.backup.manifest import BASES, SECRETS
    from loraplex.backup.restore import restore as run
    from loraplex.backup.source import SECRET_FILES
    from loraplex_registry.app import head, knows_revision

    source, settings = _find_source(data_dir)
    target = source.folder.path
    with _Bar() as bar:
        manifest = run(backup, target, bar)
    bases = [str(target / BASES / name) for name in manifest.list_names(BASES)]
    # one that is ahead, and serves this program, stays
    now_at = head() if knows_revision(manifest.revision) else manifest.revision
    if as_json:
        print_json(_describe(backup, manifest, ()) | {"data_dir": str(target), "now_at": now_at, "base_folders": bases})
        return
    done(f"{target} is the platform as it was at {manifest.made_at}: {manifest.num_artifacts} adapters.")
    if manifest.revision != now_at:
        say(f"Its database went from {manifest.revision} to {now_at}.")
    absent = sorted(set(SECRET_FILES) - set(manifest.list_names(SECRETS)))
    if absent:
        say(f"The backup has no {', '.join(absent)}: put yours into {target} before the first start, or give the")
        say("settings that they stood for. Without key.pepper no API key works.")
    if settings.get("database_url") or settings.get("object_store_url"):
        say("LORAPLEX_DATABASE_URL or LORAPLEX_OBJECT_STORE_URL is set: unset it, or `up` looks there and not here.")
    say("What was changed since then is not in it: revoke again the keys that were revoked since.")
    say(f"Next: loraplex up --data-dir {target}{f' --base {bases[0]}' if bases else ''}")


def _verify(backup: Path, *, as_json: bool) -> int:
    from loraplex.backup.verify import verify as run

    with _Bar() as bar:
        manifest, faults = run(backup, bar)
    if as_json:
        print_json(_describe(backup, manifest, faults))
        return 1 if faults else 0
    _show_faults(faults, title="What is wrong")
    _show_faults(manifest.damaged, title="Damaged already when the backup was made, and not in it")
    if not faults:
        size = show_size(manifest.size_bytes)
        done(f"{backup} is whole: {manifest.num_artifacts} adapters, {size}, as of {manifest.made_at}.")
    return 1 if faults else 0


def _audit(data_dir: Path | None, *, as_json: bool) -> int:
    from loraplex.backup.verify import audit

    source, _ = _find_source(data_dir)
    with _Bar() as bar:
        found = audit(source.database_url, source.object_store_url, None, bar)
    if as_json:
        facts = {"is_whole": not found.faults, "revision": found.revision, "num_artifacts": found.num_artifacts}
        print_json(facts | {"num_orphans": found.num_orphans, "faults": found.faults})
        return 1 if found.faults else 0
    _show_faults(found.faults, title="What is wrong")
    if not found.faults:
        done(f"Database and store agree: {found.num_artifacts} adapters, each with its digest.")
    if found.num_orphans:
        say(f"{found.num_orphans} more lie in the store that no version names; the registry's sweep removes such.")
    return 1 if found.faults else 0


def _find_source(data_dir: Path | None) -> tuple[Source, dict[str, str]]:
    from loraplex.backup.source import find_source
    from loraplex.client.location import default_data_dir
    from loraplex_registry.wire.setting import read_settings

    settings = read_settings(os.environ, "up")
    return find_source(data_dir or default_data_dir(os.environ), settings), settings


def _list_missing_secrets(manifest: BackupManifest, settings: dict[str, str]) -> list[str]:
    """Settings that stand for secrets which the data folder does not have: nobody else backs them up."""
    from loraplex.backup.manifest import SECRETS
    from loraplex.backup.source import SECRET_SETTINGS

    copied = manifest.list_names(SECRETS)
    return [
        f"LORAPLEX_{key.upper()}" for file, key in SECRET_SETTINGS.items() if file not in copied and key in settings
    ]


def _describe(backup: Path, manifest: BackupManifest, faults: Sequence[Fault]) -> dict[str, Any]:
    from loraplex.backup.manifest import BASES, SECRETS

    facts = msgspec.structs.asdict(manifest) | {
        "backup": str(backup),
        "is_whole": not faults,
        "faults": faults,
        "size_bytes": manifest.size_bytes,
        "secrets": manifest.list_names(SECRETS),
        "copied_bases": manifest.list_names(BASES),
        "num_files": len(manifest.files),
    }
    del facts["files"]
    return facts


def _say_made(place: Path, manifest: BackupManifest, missing: list[str], *, with_secrets: bool) -> None:
    size = show_size(manifest.size_bytes)
    done(f"{place}: {manifest.num_artifacts} adapters, {size}, as of {manifest.made_at}; verified.")
    if with_secrets:
        say("It holds the platform's keys: whoever can read it can act as its administrator.")
    else:
        say("The platform's keys are not in it, keep them elsewhere: without key.pepper no API key works afterwards.")
    if missing:
        say(f"Given by settings and so not in it, keep them yourself: {', '.join(missing)}.")
    from loraplex.backup.manifest import BASES

    if not manifest.list_names(BASES):
        names = ", ".join(base.name for base in manifest.bases)
        say(f"The base is not in it{f' ({names})' if names else ''}: `up` fetches it again, or say --with-base.")


def _show_faults(faults: Sequence[Fault], *, title: str) -> None:
    if faults:
        rows = [(fault.kind, fault.subject, fault.message) for fault in faults]
        print_table(title, ("fault", "where", "what"), rows, empty="")


class _Bar:
    """A bar on a terminal; a `Watcher`."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = progress_bar(*columns, TimeRemainingColumn())
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int | None) -> None:
        """Show that a stage begins."""
        self._progress.reset(self._task, description=what, total=total)

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._progress.advance(self._task, count)
