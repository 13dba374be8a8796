"""The gateway: tenants, keys, requests, usage, events, its names epoch; and the view over all parts' events."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002_gateway"
down_revision = "0001_registry"
branch_labels = None
depends_on = None
breaks_previous = False

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
INSTANT = sa.DateTime(timezone=True)
AUDIT_VIEW = """CREATE VIEW audit_event AS
SELECT id, public_id, at, action, tenant_id, tenant, subject, actor, key_id, request_id, details FROM registry_event
UNION ALL
SELECT id, public_id, at, action, tenant_id, tenant, subject, actor, key_id, request_id, details FROM gateway_event"""


def upgrade() -> None:
    _create_tenant()
    _create_api_key()
    _create_request()
    _create_usage()
    _create_gateway_epoch()
    _create_gateway_event()
    op.execute(sa.text("INSERT INTO gateway_epoch (id, epoch) VALUES (1, 1)"))
    op.execute(sa.text(AUDIT_VIEW))


def downgrade() -> None:
    op.execute(sa.text("DROP VIEW audit_event"))
    for table in ("gateway_event", "gateway_epoch", "usage", "request", "api_key", "tenant"):
        op.drop_table(table)


def _create_tenant() -> None:
    op.create_table(
        "tenant",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("display_name", sa.String(length=200), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("bases", JSON, nullable=True),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("deleted_at", INSTANT, nullable=True),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('active', 'suspended', 'deleted')", name=op.f("ck_tenant_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenant")),
    )
    op.create_index(op.f("ix_tenant_changed_epoch"), "tenant", ["changed_epoch"], unique=False)
    op.create_index(
        "uq_tenant_name",
        "tenant",
        ["name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )


def _create_api_key() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("public_id", sa.String(length=40), nullable=False),
        sa.Column("lookup", sa.String(length=32), nullable=False),
        sa.Column("secret_hmac", sa.LargeBinary(length=32), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=True),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("scopes", JSON, nullable=False),
        sa.Column("is_bootstrap", sa.Boolean(), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("created_by", sa.String(length=200), nullable=False),
        sa.Column("expires_at", INSTANT, nullable=True),
        sa.Column("revoked_at", INSTANT, nullable=True),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("role IN ('tenant', 'admin', 'admin_readonly')", name=op.f("ck_api_key_role")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("lookup", name=op.f("uq_api_key_lookup")),
        sa.UniqueConstraint("public_id", name=op.f("uq_api_key_public_id")),
    )
    op.create_index(op.f("ix_api_key_changed_epoch"), "api_key", ["changed_epoch"], unique=False)
    op.create_index(op.f("ix_api_key_tenant_id"), "api_key", ["tenant_id"], unique=False)


def _named_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("adapter_id", sa.String(length=40), nullable=True),
        sa.Column("adapter", sa.String(length=63), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("digest", sa.String(length=71), nullable=True),
        sa.Column("base", sa.String(length=63), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("route", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("is_stream", sa.Boolean(), nullable=False),
        sa.Column("client_request_id", sa.String(length=200), nullable=True),
        sa.Column("tags", JSON, nullable=True),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("replica", sa.String(length=256), nullable=False),
    ]


def _create_request() -> None:
    op.create_table(
        "request",
        *_named_columns(),
        sa.Column("tokens_seen", sa.Integer(), nullable=False),
        sa.Column("settled_at", INSTANT, nullable=True),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_request")),
    )
    op.create_index(
        "ix_request_open",
        "request",
        ["created_at"],
        unique=False,
        sqlite_where=sa.text("settled_at IS NULL"),
        postgresql_where=sa.text("settled_at IS NULL"),
    )


def _create_usage() -> None:
    op.create_table(
        "usage",
        *_named_columns(),
        sa.Column("settled_at", INSTANT, nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("finish", sa.String(length=16), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queue_s", sa.Float(), nullable=False),
        sa.Column("prefill_s", sa.Float(), nullable=False),
        sa.Column("load_s", sa.Float(), nullable=False),
        sa.Column("decode_s", sa.Float(), nullable=False),
        sa.Column("preemptions", sa.Integer(), nullable=False),
        sa.CheckConstraint("outcome IN ('ok', 'cancelled', 'error', 'lost')", name=op.f("ck_usage_outcome")),
        sa.CheckConstraint(
            "digest IS NULL OR (length(digest) = 71 AND substr(digest, 1, 7) = 'sha256:')", name=op.f("ck_usage_digest")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_usage")),
    )
    op.create_index("ix_usage_tenant_created_at", "usage", ["tenant_id", "created_at"], unique=False)
    op.create_index("ix_usage_created_at", "usage", ["created_at"], unique=False)


def _create_gateway_epoch() -> None:
    op.create_table(
        "gateway_epoch",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_gateway_epoch_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateway_epoch")),
    )


def _create_gateway_event() -> None:
    op.create_table(
        "gateway_event",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("public_id", sa.String(length=40), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("tenant", sa.String(length=63), nullable=True),
        sa.Column("subject", sa.String(length=300), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("details", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateway_event")),
        sa.UniqueConstraint("public_id", name=op.f("uq_gateway_event_public_id")),
    )
    op.create_index(op.f("ix_gateway_event_at"), "gateway_event", ["at"], unique=False)
