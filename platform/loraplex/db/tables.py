"""The gateway's tables: tenants, keys, requests, usage, outcomes, statistics, escalations, sessions, events, the epoch.

Data, no behaviour.

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
_EVENT_INDEXES = ("tenant_id", "actor", "action", "subject", "key_id")
_NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789-"
_Json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

tenant = sa.Table(
    "tenant",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("display_name", sa.String(200)),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("bases", _Json),
    sa.Column("limits", _Json),
    sa.Column("weight", sa.Integer),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("deleted_at", UtcDateTime),
    sa.Column("changed_epoch", sa.BigInteger, nullable=False, index=True),
    sa.CheckConstraint("weight BETWEEN 1 AND 1000", name="weight"),
    sa.CheckConstraint("state IN ('active', 'suspended', 'deleted')", name="state"),
    sa.CheckConstraint(
        f"length(name) BETWEEN 1 AND 63 AND ltrim(name, '{_NAME_CHARACTERS}') = '' "
        "AND substr(name, 1, 1) <> '-' AND substr(name, length(name), 1) <> '-'",
        name="name_form",
    ),
    sa.CheckConstraint("(state = 'deleted') = (deleted_at IS NOT NULL)", name="deleted_at"),
    sa.CheckConstraint("changed_epoch >= 1", name="changed_epoch"),
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
    sa.Column("tenant_id", sa.Uuid, sa.ForeignKey("tenant.id"), index=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("scopes", _Json, nullable=False),
    sa.Column("is_bootstrap", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("created_by", sa.String(200), nullable=False),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("revoked_at", UtcDateTime),
    sa.Column("limits", _Json),
    sa.Column("priority", sa.Integer),
    sa.Column("last_used_at", UtcDateTime),
    sa.Column("rotated_from", sa.String(40)),
    sa.Column("changed_epoch", sa.BigInteger, nullable=False, index=True),
    sa.CheckConstraint("priority BETWEEN -8 AND 8", name="priority"),
    sa.CheckConstraint("role IN ('tenant', 'admin', 'admin_readonly')", name="role"),
    sa.CheckConstraint("length(secret_hmac) = 32", name="secret_hmac"),
    sa.CheckConstraint("role <> 'tenant' OR tenant_id IS NOT NULL", name="tenant_of_role"),
    sa.CheckConstraint("NOT is_bootstrap OR (role = 'admin' AND tenant_id IS NULL)", name="bootstrap"),
    sa.CheckConstraint("expires_at > created_at", name="expires_at"),
    sa.CheckConstraint("changed_epoch >= 1", name="changed_epoch"),
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
    sa.Column("gateway", sa.String(40)),
    sa.CheckConstraint("tokens_seen >= 0", name="tokens_seen"),
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
    sa.Column("load_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.CheckConstraint("outcome IN ('ok', 'cancelled', 'error', 'lost')", name="outcome"),
    sa.CheckConstraint("digest IS NULL OR (length(digest) = 71 AND substr(digest, 1, 7) = 'sha256:')", name="digest"),
)
sa.Index("ix_usage_tenant_created_at", usage.c.tenant_id, usage.c.created_at)
sa.Index("ix_usage_created_at", usage.c.created_at)

version_outcome = sa.Table(
    "version_outcome",
    metadata,
    sa.Column("adapter_id", sa.String(40), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("minute", UtcDateTime, primary_key=True),
    sa.Column("outcome", sa.String(16), primary_key=True),
    sa.Column("num_requests", sa.BigInteger, nullable=False),
    sa.CheckConstraint("outcome IN ('ok', 'cancelled', 'error', 'lost')", name="outcome"),
    sa.CheckConstraint("num_requests >= 1", name="num_requests"),
)
sa.Index("ix_version_outcome_minute", version_outcome.c.minute)

stats_piece = sa.Table(
    "stats_piece",
    metadata,
    sa.Column("gateway", sa.String(40), primary_key=True),
    sa.Column("span_s", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("began_at", UtcDateTime, primary_key=True, index=True),
    sa.Column("minute", UtcDateTime, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.CheckConstraint("span_s IN (10, 60)", name="span_s"),
    sa.CheckConstraint("length(content) >= 1", name="content"),
)

_OPEN = "state IN ('requested', 'approved', 'registered', 'active', 'overdue')"

escalation = sa.Table(
    "escalation",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("public_id", sa.String(40), nullable=False, unique=True),
    sa.Column("tenant_id", sa.String(40), nullable=False),
    sa.Column("tenant", sa.String(63), nullable=False),
    sa.Column("adapter_id", sa.String(40), nullable=False),
    sa.Column("adapter", sa.String(63), nullable=False),
    sa.Column("base", sa.String(63), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("digest", sa.String(71), nullable=False),
    sa.Column("evidence", _Json, nullable=False),
    sa.Column("figures", _Json, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("requested_by", sa.String(200), nullable=False),
    sa.Column("requested_key", sa.String(40), nullable=False),
    sa.Column("requested_issuer", sa.String(200)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Column("approval", _Json),
    sa.Column("owner", sa.String(200)),
    sa.Column("budget_cents", sa.BigInteger),
    sa.Column("currency", sa.String(3)),
    sa.Column("review_at", UtcDateTime),
    sa.Column("on_overdue", sa.String(8)),
    sa.Column("pool", sa.String(63)),
    sa.Column("full_version", sa.Integer),
    sa.Column("full_digest", sa.String(71)),
    sa.Column("cost_cents", sa.BigInteger),
    sa.Column("changed_at", UtcDateTime, nullable=False),
    sa.Column("held_by", sa.String(40)),
    sa.Column("held_until", UtcDateTime),
    sa.CheckConstraint(
        "state IN ('requested', 'approved', 'rejected', 'registered', 'active', 'overdue', 'closed', 'expired')",
        name="state",
    ),
    sa.CheckConstraint("revision >= 1", name="revision"),
    sa.CheckConstraint("expires_at > created_at", name="expires_at"),
    sa.CheckConstraint(
        "(approval IS NULL) = (owner IS NULL) AND (approval IS NULL) = (budget_cents IS NULL) "
        "AND (approval IS NULL) = (review_at IS NULL) AND (approval IS NULL) = (on_overdue IS NULL)",
        name="approval",
    ),
    sa.CheckConstraint(
        "(pool IS NULL) = (full_version IS NULL) AND (pool IS NULL) = (full_digest IS NULL) "
        "AND (pool IS NULL) = (cost_cents IS NULL) AND (pool IS NULL OR approval IS NOT NULL)",
        name="full",
    ),
    sa.CheckConstraint(
        "(state NOT IN ('approved', 'registered', 'active', 'overdue') OR approval IS NOT NULL) "
        "AND (state NOT IN ('registered', 'active', 'overdue') OR pool IS NOT NULL)",
        name="state_facts",
    ),
    sa.CheckConstraint("on_overdue IN ('keep', 'revert')", name="on_overdue"),
    sa.CheckConstraint("budget_cents >= 0 AND cost_cents >= 0", name="amounts"),
    sa.CheckConstraint("(held_by IS NULL) = (held_until IS NULL)", name="held"),
)
sa.Index(
    "uq_escalation_open",
    escalation.c.adapter_id,
    unique=True,
    sqlite_where=sa.text(_OPEN),
    postgresql_where=sa.text(_OPEN),
)
sa.Index("ix_escalation_tenant_id", escalation.c.tenant_id, escalation.c.id)
sa.Index("ix_escalation_state", escalation.c.state, escalation.c.id)

escalation_history = sa.Table(
    "escalation_history",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("escalation_id", sa.Uuid, sa.ForeignKey("escalation.id"), nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("verb", sa.String(16), nullable=False),
    sa.Column("from_state", sa.String(16)),
    sa.Column("to_state", sa.String(16), nullable=False),
    sa.Column("actor", sa.String(200), nullable=False),
    sa.Column("key_id", sa.String(40), nullable=False),
    sa.Column("request_id", sa.String(40), nullable=False),
    sa.Column("details", _Json, nullable=False),
    sa.UniqueConstraint("escalation_id", "revision"),
    sa.CheckConstraint("revision >= 1", name="revision"),
    sa.CheckConstraint("(revision = 1) = (from_state IS NULL)", name="from_state"),
    sa.CheckConstraint("actor <> ''", name="actor_form"),
)

gateway_idempotency = sa.Table(
    "gateway_idempotency",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("key_id", sa.String(40), nullable=False),
    sa.Column("route", sa.String(300), nullable=False),
    sa.Column("idempotency_key", sa.String(200), nullable=False),
    sa.Column("content", sa.String(64), nullable=False),
    sa.Column("status", sa.Integer),
    sa.Column("body", sa.Text),
    sa.Column("created_at", UtcDateTime, nullable=False, index=True),
    sa.UniqueConstraint("key_id", "route", "idempotency_key"),
    sa.CheckConstraint("(status IS NULL) = (body IS NULL)", name="answer"),
    sa.CheckConstraint("status BETWEEN 200 AND 599", name="status"),
    sa.CheckConstraint("idempotency_key <> ''", name="key_form"),
)

dashboard_session = sa.Table(
    "dashboard_session",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("token_hash", sa.LargeBinary(32), nullable=False, unique=True),
    sa.Column("key_id", sa.String(40), nullable=False, index=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("seen_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.CheckConstraint("length(token_hash) = 32", name="token_hash"),
    sa.CheckConstraint("role IN ('tenant', 'admin', 'admin_readonly')", name="role"),
    sa.CheckConstraint("expires_at > created_at", name="expires_at"),
)

quota_debt = sa.Table(
    "quota_debt",
    metadata,
    sa.Column("quota", sa.String(120), primary_key=True),
    sa.Column("period", sa.Integer, nullable=False),
    sa.Column("carried", sa.BigInteger, nullable=False),
    sa.Column("owed", sa.BigInteger, nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.CheckConstraint("carried >= 0 AND owed >= 0", name="amounts"),
)

gateway_epoch = sa.Table(
    "gateway_epoch",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.CheckConstraint("id = 1", name="one_row"),
    sa.CheckConstraint("epoch >= 1", name="epoch"),
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
    sa.Column("request_id", sa.String(40), nullable=False, index=True),
    sa.Column("details", _Json, nullable=False),
    sa.CheckConstraint("replace(action, '.', '') <> action", name="action_form"),
    sa.CheckConstraint("actor <> ''", name="actor_form"),
    sa.CheckConstraint("key_id <> ''", name="key_form"),
)
sa.Index("ix_gateway_event_at", gateway_event.c.at)
for _column in _EVENT_INDEXES:
    sa.Index(f"ix_gateway_event_{_column}", gateway_event.c[_column], gateway_event.c.id)
