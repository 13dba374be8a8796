"""The registry: bases, adapters, versions, aliases, events, the names epoch; and which programs a schema serves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001_registry"
down_revision = None
branch_labels = None
depends_on = None
breaks_previous = False

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
INSTANT = sa.DateTime(timezone=True)
TABLES = (
    "compatible_revision",
    "base",
    "registry_epoch",
    "registry_event",
    "registry_idempotency",
    "adapter",
    "adapter_version",
    "alias",
    "alias_history",
)


def upgrade() -> None:
    op.create_table("compatible_revision", sa.Column("revision", sa.String(32), primary_key=True))
    _create_base()
    _create_registry_epoch()
    _create_registry_event()
    _create_registry_idempotency()
    _create_adapter()
    _create_adapter_version()
    _create_alias()
    _create_alias_history()
    op.execute(sa.text("INSERT INTO registry_epoch (id, epoch) VALUES (1, 1)"))


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)


def _create_base() -> None:
    op.create_table(
        "base",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("accepted_names", JSON, nullable=False),
        sa.Column("fingerprint", sa.String(length=128), nullable=False),
        sa.Column("weights_digest", sa.String(length=128), nullable=False),
        sa.Column("architecture", sa.String(length=128), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=False),
        sa.Column("modules", JSON, nullable=False),
        sa.Column("max_lora_rank", sa.Integer(), nullable=False),
        sa.Column("default_context", sa.Integer(), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_base")),
        sa.UniqueConstraint("fingerprint", name=op.f("uq_base_fingerprint")),
        sa.UniqueConstraint("name", name=op.f("uq_base_name")),
    )
    op.create_index(op.f("ix_base_changed_epoch"), "base", ["changed_epoch"], unique=False)


def _create_registry_epoch() -> None:
    op.create_table(
        "registry_epoch",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_registry_epoch_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_registry_epoch")),
    )


def _create_registry_event() -> None:
    op.create_table(
        "registry_event",
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
        sa.PrimaryKeyConstraint("id", name=op.f("pk_registry_event")),
        sa.UniqueConstraint("public_id", name=op.f("uq_registry_event_public_id")),
    )
    op.create_index(op.f("ix_registry_event_at"), "registry_event", ["at"], unique=False)


def _create_registry_idempotency() -> None:
    op.create_table(
        "registry_idempotency",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("route", sa.String(length=300), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=False),
        sa.Column("content", sa.String(length=64), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_registry_idempotency")),
        sa.UniqueConstraint(
            "key_id", "route", "idempotency_key", name=op.f("uq_registry_idempotency_key_id_route_idempotency_key")
        ),
    )
    op.create_index(op.f("ix_registry_idempotency_created_at"), "registry_idempotency", ["created_at"], unique=False)


def _create_adapter() -> None:
    op.create_table(
        "adapter",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("base_id", sa.Uuid(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("created_by", sa.String(length=200), nullable=False),
        sa.Column("deleted_at", INSTANT, nullable=True),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("next_number >= 1", name=op.f("ck_adapter_next_number")),
        sa.ForeignKeyConstraint(["base_id"], ["base.id"], name=op.f("fk_adapter_base_id_base")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter")),
    )
    op.create_index(op.f("ix_adapter_changed_epoch"), "adapter", ["changed_epoch"], unique=False)
    op.create_index(
        "uq_adapter_default",
        "adapter",
        ["tenant_id"],
        unique=True,
        sqlite_where=sa.text("is_default"),
        postgresql_where=sa.text("is_default"),
    )
    op.create_index(
        "uq_adapter_tenant_id_name",
        "adapter",
        ["tenant_id", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )


def _create_adapter_version() -> None:
    op.create_table(
        "adapter_version",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("adapter_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("target_modules", JSON, nullable=False),
        sa.Column("num_parameters", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", JSON, nullable=False),
        sa.Column("report", JSON, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("created_by", sa.String(length=200), nullable=False),
        sa.Column("retired_at", INSTANT, nullable=True),
        sa.CheckConstraint("kind IN ('lora', 'full')", name=op.f("ck_adapter_version_kind")),
        sa.CheckConstraint(
            "length(digest) = 71 AND substr(digest, 1, 7) = 'sha256:' "
            "AND ltrim(substr(digest, 8), '0123456789abcdef') = ''",
            name=op.f("ck_adapter_version_digest_format"),
        ),
        sa.CheckConstraint(
            "state IN ('validating', 'ready', 'quarantined', 'retired', 'purged')",
            name=op.f("ck_adapter_version_state"),
        ),
        sa.CheckConstraint("number >= 1", name=op.f("ck_adapter_version_number")),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapter.id"], name=op.f("fk_adapter_version_adapter_id_adapter")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_version")),
        sa.UniqueConstraint("adapter_id", "number", name=op.f("uq_adapter_version_adapter_id_number")),
    )
    op.create_index(op.f("ix_adapter_version_digest"), "adapter_version", ["digest"], unique=False)
    op.create_index(
        "uq_adapter_version_adapter_id_digest",
        "adapter_version",
        ["adapter_id", "digest"],
        unique=True,
        sqlite_where=sa.text("state <> 'purged'"),
        postgresql_where=sa.text("state <> 'purged'"),
    )


def _create_alias() -> None:
    op.create_table(
        "alias",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("adapter_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("targets", JSON, nullable=False),
        sa.Column("updated_at", INSTANT, nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapter.id"], name=op.f("fk_alias_adapter_id_adapter")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alias")),
        sa.UniqueConstraint("adapter_id", "name", name=op.f("uq_alias_adapter_id_name")),
    )


def _create_alias_history() -> None:
    op.create_table(
        "alias_history",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("alias_id", sa.Uuid(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("targets", JSON, nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.ForeignKeyConstraint(["alias_id"], ["alias.id"], name=op.f("fk_alias_history_alias_id_alias")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alias_history")),
        sa.UniqueConstraint("alias_id", "revision", name=op.f("uq_alias_history_alias_id_revision")),
    )
