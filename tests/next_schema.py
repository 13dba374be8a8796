"""The next release as far as a database can tell: this program's migrations and one more, run by another process."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from loraplex_registry.app import head
from loraplex_registry.db.migration import migrations_folder

FUTURE = "0099_future"
EXPANDING = """
OF_MIGRATIONS = {"alembic_version", "compatible_revision"}


def upgrade() -> None:
    for table in sorted(set(sa.inspect(op.get_bind()).get_table_names()) - OF_MIGRATIONS):
        op.add_column(table, sa.Column("mood", sa.String(16), nullable=True))
        op.add_column(table, sa.Column("joules", sa.BigInteger(), nullable=False, server_default="7"))
        op.create_index(f"ix_{table}_joules", table, ["joules"])
        op.create_index(f"uq_{table}_mood", table, ["mood"], unique=True)
    op.create_table(
        "future",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("alias_id", sa.Uuid(), sa.ForeignKey("alias.id", ondelete="CASCADE"), nullable=True),
        sa.Column("word", sa.String(16), nullable=False),
        sa.CheckConstraint("word <> ''", name="ck_future_word"),
    )
    op.create_index("ix_usage_model", "usage", ["model"])
    op.execute("CREATE VIEW future_view AS SELECT name, mood FROM tenant")
"""
"""Each kind of step that an expanding migration of the next release may be made of, on every table there is."""

_RUN = """
import sys
from pathlib import Path

from loraplex.cli.app import main
from loraplex_registry.db import migration

migration.migrations_folder = lambda: Path(sys.argv[1])
sys.exit(main(["db", "upgrade", "--json", "--url", sys.argv[2]]))
"""


def write_next_migrations(to: Path, *, breaks_previous: bool = False, text: str = EXPANDING) -> Path:
    """Make the folder of migrations that the next release brings."""
    shutil.copytree(migrations_folder(), to, ignore=shutil.ignore_patterns("__pycache__"))
    names = f'revision = "{FUTURE}"\ndown_revision = "{head()}"\nbreaks_previous = {breaks_previous}\n'
    imports = "import sqlalchemy as sa\nfrom alembic import op\n"
    (to / "versions" / f"{FUTURE}.py").write_text(f'"""The future."""\n\n{imports}\n{names}\n{text}')
    return to


class NextUpgrade:
    """`loraplex db upgrade` of the next release, as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, migrations: Path, url: str) -> NextUpgrade:
        """Start it."""
        pipe, environ = asyncio.subprocess.PIPE, {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
        argv = (sys.executable, "-c", _RUN, str(migrations), url)
        return cls(await asyncio.create_subprocess_exec(*argv, env=environ, stdout=pipe, stderr=pipe))

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def wait(self) -> str:
        """Wait for its good end and return what it printed."""
        try:
            async with asyncio.timeout(120):
                output, errors = await self._process.communicate()
        except BaseException:
            self._process.kill()
            await self._process.wait()
            raise
        assert self._process.returncode == 0, errors.decode()
        return output.decode()
