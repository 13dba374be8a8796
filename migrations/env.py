"""Runs the one migration history of all parts, on SQLite and Postgres.

The database is the connection handed over by the program (`config.attributes`), else `sqlalchemy.url`, else
LORAPLEX_DATABASE_URL. After each step the list of program revisions that the schema still serves is brought up to
date: a migration that the previous program cannot live with says `breaks_previous = True`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

import sqlalchemy as sa
from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo
from alembic.script import Script

from loraplex.db.tables import metadata as gateway_metadata
from loraplex_registry.db.model import METADATA as REGISTRY_METADATA

TARGETS = [REGISTRY_METADATA, gateway_metadata]
COMPATIBLE = sa.table("compatible_revision", sa.column("revision", sa.String))


def _url() -> str:
    url = context.config.get_main_option("sqlalchemy.url") or os.environ.get("LORAPLEX_DATABASE_URL")
    if not url:
        raise SystemExit("set LORAPLEX_DATABASE_URL")
    return url.replace("sqlite+aiosqlite://", "sqlite://")


def _record_compatible(
    ctx: MigrationContext,
    step: MigrationInfo,
    heads: Collection[Any],  # noqa: ARG001
    run_args: Mapping[str, Any],  # noqa: ARG001
) -> None:
    connection, script = ctx.connection, step.up_revision
    assert connection is not None
    assert isinstance(script, Script)
    revision = step.up_revision_id
    if not step.is_upgrade:
        if sa.inspect(connection).has_table(COMPATIBLE.name):
            connection.execute(sa.delete(COMPATIBLE).where(COMPATIBLE.c.revision == revision))
        return
    if getattr(script.module, "breaks_previous", False):
        connection.execute(sa.delete(COMPATIBLE))
    connection.execute(sa.insert(COMPATIBLE).values(revision=revision))


def _include(item: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:  # noqa: ARG001
    """The list of compatible revisions belongs to the migrations, not to a part."""
    return not (kind == "table" and name == COMPATIBLE.name)


def _render(kind: str, item: Any, autogen_context: Any) -> str | Literal[False]:  # noqa: ARG001
    """Write our column types as what they are in the database."""
    if kind == "type" and isinstance(item, sa.TypeDecorator):
        return f"sa.{item.impl_instance!r}"
    return False


def _run(connection: sa.Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=TARGETS,
        render_as_batch=True,
        compare_server_default=True,
        include_object=_include,
        render_item=_render,
        on_version_apply=_record_compatible,
    )
    with context.begin_transaction():
        context.run_migrations()


def _run_online() -> None:
    given = context.config.attributes.get("connection")
    if given is not None:
        _run(given)
        return
    engine = sa.create_engine(_url(), poolclass=sa.NullPool)
    try:
        with engine.connect() as connection:
            _run(connection)
    finally:
        engine.dispose()


if context.is_offline_mode():
    raise SystemExit("migrations run against a database; SQL scripts are not supported")
_run_online()
