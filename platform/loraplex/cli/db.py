"""`loraplex db`: the only commands that look at, and change, the database's schema."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import App, Parameter

from loraplex.cli.example import examples
from loraplex.cli.output import AsJson, done, print_facts, print_json, say

app = App(
    name="db",
    help="Bring the database to this program's revision.",
    help_format="plaintext",
    help_epilogue=examples("LORAPLEX_DATABASE_URL=postgresql+psycopg://... loraplex db upgrade"),
)
Url = Annotated[
    str | None,
    Parameter(name="--url", help="The database; default LORAPLEX_DATABASE_URL, else SQLite in LORAPLEX_DATA_DIR."),
]


@app.command(
    help_epilogue=examples("loraplex db upgrade", "LORAPLEX_DATABASE_URL=postgresql+psycopg://... loraplex db upgrade")
)
def upgrade(*, url: Url = None, as_json: AsJson = False) -> None:
    """Move the database to this program's revision: under a lock, and after copying a SQLite file.

    A newer database that serves this program still, as after a roll-back, stays as it is.
    """
    from loraplex_registry.db.migration import head
    from loraplex_registry.db.migration import upgrade as run

    result = run(_find_url(url))
    if as_json:
        copy = str(result.copy) if result.copy else None
        print_json({"before": result.before, "after": result.after, "copy": copy})
    elif result.is_changed:
        done(f"The database went from {result.before or 'empty'} to {result.after}.")
        if result.copy:
            say(f"A copy of what it was: {result.copy}")
    elif result.after != head():
        done(f"The database is at {result.after}, newer than this program, which it serves; nothing to do.")
    else:
        done(f"The database is at {result.after}; nothing to do.")


@app.command(help_epilogue=examples("loraplex db current", "loraplex db current --json"))
def current(*, url: Url = None, as_json: AsJson = False) -> int:
    """Show the database's revision and this program's; the exit code is 3 if this program may not run on it.

    A database may be newer and serve this program still: then programs of both releases run side by side.
    """
    from loraplex_registry.db.migration import current as find
    from loraplex_registry.db.migration import head, knows_revision, serves

    place = _find_url(url)
    found, needed, is_served = find(place), head(), serves(place)
    facts = {"current": found, "head": needed, "is_current": found == needed, "is_served": is_served}
    if as_json:
        print_json(facts)
    else:
        print_facts(facts)
        if not is_served:
            is_older = found is None or knows_revision(found)
            say("Run: loraplex db upgrade" if is_older else "The database left this program behind: use the newer one.")
        elif found != needed:
            say("The database is newer than this program, which it serves; both releases may run.")
    return 0 if is_served else 3


def _find_url(told: str | None) -> str:
    if told:
        return told
    from loraplex.client.location import default_data_dir
    from loraplex_registry.wire.setting import read_settings

    settings = read_settings(os.environ, "up")
    return settings.get("database_url") or f"sqlite+aiosqlite:///{default_data_dir(os.environ).resolve()}/loraplex.db"
