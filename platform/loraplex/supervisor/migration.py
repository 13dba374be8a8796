"""The database at start: `loraplex db upgrade` brings it to this program's revision, under a lock, after a copy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import msgspec

from loraplex.supervisor.errors import UpError

_SQLITE = "sqlite"
_UNAVAILABLE = "unavailable"


class _Upgraded(msgspec.Struct):
    before: str | None
    after: str
    copy: str | None


class _Refusal(msgspec.Struct):
    message: str
    code: str


class _Refused(msgspec.Struct):
    error: _Refusal


async def migrate(env: dict[str, str]) -> str:
    """Bring the database to this program's revision and say what was done.

    Raises:
        UpError: The migration failed; the command's reason is in the message.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplex", "db", "upgrade", "--json"),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise UpError(_explain(errors.decode(errors="replace").strip(), env))
    done = msgspec.json.decode(output, type=_Upgraded)
    if done.before in (None, done.after):
        return done.after
    return f"{done.before} -> {done.after}, copy of the old one: {done.copy or 'none'}"


def _explain(errors: str, env: Mapping[str, str]) -> str:
    """Return why there is no database, and what to do; a fault of the command itself is shown as it stands."""
    try:
        refusal = msgspec.json.decode(errors.rpartition("\n")[2], type=_Refused).error
    except msgspec.MsgspecError:
        return f"The database could not be upgraded:\n\n{errors}"
    # a driver adds lines that guess at the cause
    why = refusal.message.partition("\n")[0].rstrip(".")
    if refusal.code != _UNAVAILABLE:
        return f"The database could not be upgraded: {why}."
    if env.get("LORAPLEX_DATABASE_URL", "").startswith(_SQLITE):
        return f"{why}. Look at the file that LORAPLEX_DATABASE_URL or the data folder has, and at its disk."
    return f"{why}. Start the database, or correct LORAPLEX_DATABASE_URL; `loraplex doctor` looks closer."
