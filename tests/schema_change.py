"""What a migration takes from programs that ran before it: a comparison of the schema before and after.

A program of release N reads and writes the schema of N+1 if that only adds: tables, indexes, columns that may be left
out of an INSERT. Everything else is a `Loss`, and belongs into the contract half of a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

OF_MIGRATIONS = {"alembic_version", "compatible_revision"}


@dataclass(frozen=True)
class Table:
    """A table as far as programs depend on it."""

    columns: dict[str, tuple[str, bool, bool]] = field(default_factory=dict)
    """Name to type, whether it takes NULL, whether it may be left out of an INSERT."""
    rules: frozenset[str] = frozenset()
    """CHECKs, unique constraints and indexes, foreign keys, by their text: what a row must obey."""

    holds: frozenset[str] = frozenset()
    """Tables whose rows cannot be deleted while a row here names them."""


@dataclass(frozen=True)
class Schema:
    """All tables, and views and triggers by name with their text."""

    tables: dict[str, Table]
    views: dict[str, str]
    guards: dict[str, str]


def read_schema(connection: sa.Connection) -> Schema:
    """Read what is there."""
    inspector = sa.inspect(connection)
    names = set(inspector.get_table_names()) - OF_MIGRATIONS
    views = {name: str(inspector.get_view_definition(name)) for name in inspector.get_view_names()}
    return Schema({name: _read_table(inspector, name) for name in names}, views, _read_guards(connection))


def _read_table(inspector: sa.Inspector, name: str) -> Table:
    columns = {
        column["name"]: (str(column["type"]), column["nullable"], column["nullable"] or _has_default(column))
        for column in inspector.get_columns(name)
    }
    checks = {f"CHECK {check['sqltext']}" for check in inspector.get_check_constraints(name)}
    unique = {f"UNIQUE {each['column_names']}" for each in inspector.get_unique_constraints(name)}
    indexes = {f"UNIQUE {_show(index)}" for index in inspector.get_indexes(name) if index["unique"]}
    keys = {f"KEY {key['constrained_columns']} {key['referred_table']}" for key in inspector.get_foreign_keys(name)}
    holds = {key["referred_table"] for key in inspector.get_foreign_keys(name) if not _lets_go(key)}
    return Table(columns, frozenset(checks | unique | indexes | keys), frozenset(holds))


def _lets_go(key: Any) -> bool:
    return str(key.get("options", {}).get("ondelete", "")).upper() in ("CASCADE", "SET NULL")


def _show(index: Any) -> str:
    where = {name: str(value) for name, value in index.get("dialect_options", {}).items() if name.endswith("_where")}
    return f"{index['column_names']} {where or ''}".strip()


def _has_default(column: Any) -> bool:
    return column.get("default") is not None or bool(column.get("computed"))


def _read_guards(connection: sa.Connection) -> dict[str, str]:
    query = (
        "SELECT name, sql AS text FROM sqlite_master WHERE type = 'trigger'"
        if connection.dialect.name == "sqlite"
        else "SELECT proname AS name, prosrc AS text FROM pg_proc "
        "JOIN pg_namespace n ON n.oid = pronamespace WHERE nspname = 'public'"
    )
    return {row.name: row.text for row in connection.execute(sa.text(query))}


def find_losses(before: Schema, after: Schema) -> Iterator[str]:
    """Yield what a program that knows only `before` can no longer do on `after`."""
    for name, old in sorted(before.tables.items()):
        new = after.tables.get(name)
        if new is None:
            yield f"table {name} is gone"
        else:
            yield from (f"{name}{loss}" for loss in _find_table_losses(old, new))
    for name in sorted(after.tables.keys() - before.tables.keys()):
        for held in sorted(after.tables[name].holds & before.tables.keys()):
            yield f"{name} holds rows of {held}: they could not be deleted any more, without ON DELETE"
    for name in sorted(before.views.keys() - after.views.keys()):
        yield f"view {name} is gone"
    for name, text in sorted(after.guards.items()):
        if before.guards.get(name) != text and any(f"guard_{table}_" in name for table in before.tables):
            yield f"{name} is stricter, or other than it was"


def _find_table_losses(old: Table, new: Table) -> Iterator[str]:
    for name, (kind, takes_null, _) in old.columns.items():
        if name not in new.columns:
            yield f".{name} is gone"
            continue
        new_kind, new_takes_null, _ = new.columns[name]
        if new_kind != kind:
            yield f".{name} is {new_kind}, and was {kind}"
        if takes_null and not new_takes_null:
            yield f".{name} takes no NULL any more"
    for name in new.columns.keys() - old.columns.keys():
        if not new.columns[name][2]:
            yield f".{name} is new and must be given: it has no default and takes no NULL"
    new_columns = new.columns.keys() - old.columns.keys()
    for rule in sorted(new.rules - old.rules):
        if not _is_of_new_columns(rule, new_columns, old.columns):
            yield f" has a new rule for rows: {rule}"


def _is_of_new_columns(rule: str, new: Any, old: Any) -> bool:
    """A rule about new columns alone: a row that leaves them out obeys it, as NULL or by its default."""
    words = set(re.findall(r"[a-z_]+", rule))
    return bool(words & set(new)) and not words & set(old)
