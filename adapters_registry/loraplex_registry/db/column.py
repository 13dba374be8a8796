"""Column types that mean the same on SQLite and Postgres, and the declarative base of the registry's tables."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Annotated, Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column

from loraplex_registry.wire.ids import new_uuid
from loraplex_registry.wire.naming import METADATA_NAMING

MAX_INTEGER, MAX_BIG_INTEGER = 2**31 - 1, 2**63 - 1
"""What an integer column and a big one hold on every dialect."""


class UtcDateTime(sa.TypeDecorator[datetime]):
    """An aware instant in UTC, also where the database (SQLite) forgets the zone."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:  # noqa: ARG002
        """Store in UTC; a naive instant is a mistake of ours."""
        if value is None:
            return None
        assert value.tzinfo is not None, "instants are aware"
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:  # noqa: ARG002
        """Return an aware instant."""
        if value is None:
            return None
        found: datetime = value
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


Json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
JsonList = Annotated[list[Any], mapped_column(Json)]
JsonDict = Annotated[dict[str, Any], mapped_column(Json)]
Key = Annotated[uuid.UUID, mapped_column(sa.Uuid, primary_key=True, default=new_uuid)]
Instant = Annotated[datetime, mapped_column(UtcDateTime, default=lambda: datetime.now(UTC))]
Name = Annotated[str, mapped_column(sa.String(63))]
PublicId = Annotated[str, mapped_column(sa.String(40))]
Actor = Annotated[str, mapped_column(sa.String(200))]
Digest = Annotated[str, mapped_column(sa.String(71))]
Big = Annotated[int, mapped_column(sa.BigInteger)]


def digest_is_valid(column: str) -> sa.CheckConstraint:
    """A CHECK that `column` is `sha256:` and 64 lower-case hex digits, in SQL that both dialects know."""
    return sa.CheckConstraint(
        f"length({column}) = 71 AND substr({column}, 1, 7) = 'sha256:' "
        f"AND ltrim(substr({column}, 8), '0123456789abcdef') = ''",
        name=f"{column}_format",
    )


_NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789-"


def name_is_valid(column: str = "name") -> sa.CheckConstraint:
    """A CHECK that `column` is a name as `naming.NAME_PATTERN` has it, in SQL that both dialects know."""
    return sa.CheckConstraint(
        f"length({column}) BETWEEN 1 AND 63 AND ltrim({column}, '{_NAME_CHARACTERS}') = '' "
        f"AND substr({column}, 1, 1) <> '-' AND substr({column}, length({column}), 1) <> '-'",
        name=f"{column}_form",
    )


def alias_name_is_valid() -> sa.CheckConstraint:
    """A CHECK that `name` is an alias as `naming.ALIAS_PATTERN` has it."""
    return sa.CheckConstraint(
        f"length(name) BETWEEN 1 AND 32 AND ltrim(name, '{_NAME_CHARACTERS}') = '' "
        "AND substr(name, 1, 1) BETWEEN 'a' AND 'z'",
        name="name_form",
    )


def answer_is_whole() -> tuple[sa.CheckConstraint, sa.CheckConstraint]:
    """CHECKs that a stored answer has status and body or neither."""
    return (
        sa.CheckConstraint("(status IS NULL) = (body IS NULL)", name="answer"),
        sa.CheckConstraint("status BETWEEN 200 AND 599", name="status"),
    )


class Row(DeclarativeBase):
    """Base of the registry's tables."""

    metadata = sa.MetaData(naming_convention=METADATA_NAMING)
