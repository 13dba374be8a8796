"""The database at start: `loraplex db upgrade` brings it to this program's revision, under a lock, after a copy."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from loraplex.supervisor.errors import UpError


class _Upgraded(msgspec.Struct):
    before: str | None
    after: str
    copy: str | None


async def migrate(env: dict[str, str]) -> str:
    """Bring the database to this program's revision and say what was done.

    Raises:
        UpError: The migration failed; the command has said why.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplex", "db", "upgrade", "--json"),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise UpError(f"The database could not be upgraded:\n\n{errors.decode(errors='replace').strip()}")
    done = msgspec.json.decode(output, type=_Upgraded)
    if done.before in (None, done.after):
        return done.after
    return f"{done.before} -> {done.after}, copy of the old one: {done.copy or 'none'}"
