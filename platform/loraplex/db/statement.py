"""Statements that are executed for each request: built once, and on SQLite compiled once and given to its driver.

SQLAlchemy takes several times longer over such a row than SQLite does. What the driver raises comes out as what
SQLAlchemy would raise.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

T = TypeVar("T")
_Values = Sequence[Mapping[str, Any]]
_DIALECT = sqlite.dialect()


class Statement:
    """One statement for both dialects.

    Args:
        build: Makes it of a dialect's module, whose `insert` differs.
    """

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.postgresql = build(postgresql)
        self._sqlite = build(sqlite)
        self._compiled: tuple[str, list[tuple[str, Callable[[Any], Any] | None]]] | None = None

    def compile(self, columns: list[str]) -> tuple[str, list[tuple[str, Callable[[Any], Any] | None]]]:
        """Return SQLite's text, and for each of its parameters the column and what makes its value one of SQLite."""
        if self._compiled is None:
            compiled = self._sqlite.compile(dialect=_DIALECT, column_keys=columns)
            binds = [
                (name, compiled.binds[name].type.dialect_impl(_DIALECT).bind_processor(_DIALECT))
                for name in compiled.positiontup
            ]
            self._compiled = (str(compiled), binds)
        return self._compiled


class Transaction(Protocol):
    """What writes inside a transaction."""

    def run(self, statement: Statement, values: _Values) -> list[Any]:
        """Execute `statement` for each of `values`, whose columns are always the same; return the first of each row."""


class SqliteTransaction:
    """One on the driver's connection, which a thread has for itself."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self, statement: Statement, values: _Values) -> list[Any]:
        """Execute; see the protocol."""
        text, binds = statement.compile(list(values[0]))
        rows: list[Any] = []
        for value in values:
            parameters = [value[name] if make is None else make(value[name]) for name, make in binds]
            rows += self._connection.execute(text, parameters)
        return [row[0] for row in rows]


class SqlTransaction:
    """One on a connection of SQLAlchemy."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def run(self, statement: Statement, values: _Values) -> list[Any]:
        """Execute; see the protocol."""
        result = self._connection.execute(statement.postgresql, list(values))
        return list(result.scalars()) if result.returns_rows else []


def transact(connect: Callable[[], sqlite3.Connection], work: Callable[[Transaction], T]) -> T:
    """Run `work` in a transaction on the connection that `connect` returns; it is committed unless something raises."""
    try:
        connection = connect()
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(SqliteTransaction(connection))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    except sqlite3.Error as error:
        # no parameters: they are a tenant's
        raise sa.exc.DBAPIError.instance("a statement of every request", None, error, sqlite3.Error) from error
    return result
