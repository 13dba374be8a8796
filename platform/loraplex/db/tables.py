"""The gateway's tables: tenant, api_key, request, usage, gateway_event, gateway_epoch. Data, no behaviour.

`changed_epoch` of a tenant or key is the names epoch of its last change, so that gateways read only what changed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from loraplex_registry.wire.naming import METADATA_NAMING


class UtcDateTime(sa.TypeDecorator[datetime]):
    """An aware instant in UTC, also where the database (SQLite) forgets the zone."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: sa.Dialect) -> datetime | None:
        """Store in UTC; a naive instant is a mistake of ours."""
        if value is None:
            return None
        assert value.tzinfo is not None, "instants are aware"
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, _dialect: sa.Dialect) -> datetime | None:
        """Return an aware instant."""
        if value is None:
            return None
        found: datetime = value
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


metadata = sa.MetaData(naming_convention=METADATA_NAMING)
_Json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

tenant = sa.Table(
    "tenant",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("display_name", sa.String(200)),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("bases", _Json),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("deleted_at", UtcDateTime),
    sa.Column("changed_epoch", sa.BigInteger, nullable=False, index=True),
    sa.CheckConstraint("state IN ('active', 'suspended', 'deleted')", name="state"),
)
sa.Index(
    "uq_tenant_name",
    tenant.c.name,
    unique=True,
    sqlite_where=tenant.c.deleted_at.is_(None),
    postgresql_where=tenant.c.deleted_at.is_(None),
)

api_key = sa.Table(
    "api_key",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("public_id", sa.String(40), nullable=False, unique=True),
    sa.Column("lookup", sa.String(32), nullable=False, unique=True),
    sa.Column("secret_hmac", sa.LargeBinary(32), nullable=False),
    sa.Column("tenant_id", sa.Uuid, index=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("scopes", _Json, nullable=False),
    sa.Column("is_bootstrap", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("created_by", sa.String(200), nullable=False),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("revoked_at", UtcDateTime),
    sa.Column("changed_epoch", sa.BigInteger, nullable=False, index=True),
    sa.CheckConstraint("role IN ('tenant', 'admin', 'admin_readonly')", name="role"),
)


def _named_columns() -> list[sa.Column[Any]]:
    """What a request was for; the same in `request` and `usage`."""
    return [
        sa.Column("tenant_id", sa.String(40)),
        sa.Column("tenant", sa.String(63), nullable=False),
        sa.Column("adapter_id", sa.String(40)),
        sa.Column("adapter", sa.String(63)),
        sa.Column("version", sa.Integer),
        sa.Column("digest", sa.String(71)),
        sa.Column("base", sa.String(63), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("route", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("is_stream", sa.Boolean, nullable=False),
        sa.Column("client_request_id", sa.String(200)),
        sa.Column("tags", _Json),
        sa.Column("created_at", UtcDateTime, nullable=False),
    ]


request = sa.Table(
    "request",
    metadata,
    sa.Column("request_id", sa.String(40), primary_key=True),
    *_named_columns(),
    sa.Column("replica", sa.String(256), nullable=False),
    sa.Column("tokens_seen", sa.Integer, nullable=False),
    sa.Column("settled_at", UtcDateTime),
)
sa.Index(
    "ix_request_open",
    request.c.created_at,
    sqlite_where=request.c.settled_at.is_(None),
    postgresql_where=request.c.settled_at.is_(None),
)

usage = sa.Table(
    "usage",
    metadata,
    sa.Column("request_id", sa.String(40), primary_key=True),
    *_named_columns(),
    sa.Column("replica", sa.String(256), nullable=False),
    sa.Column("settled_at", UtcDateTime, nullable=False),
    sa.Column("day", sa.String(10), nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("error_code", sa.String(64)),
    sa.Column("finish", sa.String(16)),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("queue_s", sa.Float, nullable=False),
    sa.Column("prefill_s", sa.Float, nullable=False),
    sa.Column("load_s", sa.Float, nullable=False),
    sa.Column("decode_s", sa.Float, nullable=False),
    sa.Column("preemptions", sa.Integer, nullable=False),
    sa.CheckConstraint("outcome IN ('ok', 'cancelled', 'error', 'lost')", name="outcome"),
    sa.CheckConstraint("digest IS NULL OR (length(digest) = 71 AND substr(digest, 1, 7) = 'sha256:')", name="digest"),
)
sa.Index("ix_usage_tenant_created_at", usage.c.tenant_id, usage.c.created_at)
sa.Index("ix_usage_created_at", usage.c.created_at)

gateway_epoch = sa.Table(
    "gateway_epoch",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.CheckConstraint("id = 1", name="one_row"),
)

gateway_event = sa.Table(
    "gateway_event",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("public_id", sa.String(40), nullable=False, unique=True),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("tenant_id", sa.String(40)),
    sa.Column("tenant", sa.String(63)),
    sa.Column("subject", sa.String(300), nullable=False),
    sa.Column("actor", sa.String(200), nullable=False),
    sa.Column("key_id", sa.String(40), nullable=False),
    sa.Column("request_id", sa.String(40), nullable=False),
    sa.Column("details", _Json, nullable=False),
)
sa.Index("ix_gateway_event_at", gateway_event.c.at)
