"""The database at start: a SQLite file is copied before it changes, then `loraplex db upgrade` changes it.

The data folder's lock is held by the caller, so only one program does this at a time.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time
from contextlib import closing

from loraplex.supervisor.data_folder import DataFolder
from loraplex.supervisor.errors import UpError

_NUM_COPIES_KEPT = 5


async def migrate(folder: DataFolder, env: dict[str, str]) -> str:
    """Bring the database to this program's revision and return its name.

    Raises:
        UpError: The migration failed; the database's copy is named.
    """
    state = json.loads(await _run_db(env, "current", "--json"))
    if not state["is_current"]:
        if folder.database.exists():
            await asyncio.to_thread(copy_database, folder)
        await _run_db(env, "upgrade")
    return str(state["head"])


def copy_database(folder: DataFolder) -> None:
    """Copy the SQLite file while others may read it; the last five copies are kept."""
    folder.backups.mkdir(mode=0o700, exist_ok=True)
    copy = folder.backups / f"loraplex-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.db"
    with closing(sqlite3.connect(folder.database)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    copy.chmod(0o600)
    for old in sorted(folder.backups.glob("loraplex-*.db"))[:-_NUM_COPIES_KEPT]:
        old.unlink()


async def _run_db(env: dict[str, str], *arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loraplex",
        "db",
        *arguments,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise UpError(f"`loraplex db {arguments[0]}` failed:\n\n{errors.decode(errors='replace').strip()}")
    return output
