"""Escalations with their history, full fine-tunes as versions, and the gateway's own idempotency keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0008_escalations"
down_revision = "0007_tenancy"
branch_labels = None
depends_on = None
breaks_previous = False

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
INSTANT = sa.DateTime(timezone=True)
STATES = "'requested', 'approved', 'rejected', 'registered', 'active', 'overdue', 'closed', 'expired'"
OPEN = "state IN ('requested', 'approved', 'registered', 'active', 'overdue')"
VERSION_COLUMNS = (
    ("pool", "VARCHAR(63)", "(kind = 'full') = (pool IS NOT NULL)"),
    ("escalation", "VARCHAR(40)", "(pool IS NULL) = (escalation IS NULL)"),
    ("replaced", "JSON", "replaced IS NULL OR pool IS NOT NULL"),
)
CONTENT = "id adapter_id number kind digest rank target_modules num_parameters size_bytes files created_at created_by"
ESCALATION_CONTENT = (
    "id public_id tenant_id tenant adapter_id adapter base version digest evidence figures reason "
    "requested_by requested_key requested_issuer created_at"
)


def upgrade() -> None:
    for name, kind, check in VERSION_COLUMNS:
        _add_version_column(name, kind, check)
    op.create_index(
        "uq_adapter_version_escalation",
        "adapter_version",
        ["escalation"],
        unique=True,
        sqlite_where=sa.text("state NOT IN ('retired', 'purged')"),
        postgresql_where=sa.text("state NOT IN ('retired', 'purged')"),
    )
    _refuse_other_values("adapter_version", CONTENT + " pool escalation", "A version never changes its content")
    _create_escalation()
    _create_escalation_history()
    _create_gateway_idempotency()
    _refuse_other_values("escalation", ESCALATION_CONTENT, "An escalation keeps what was asked for")
    _refuse("escalation", "delete", "DELETE", "The row of an escalation stays")
    _refuse("escalation_history", "update", "UPDATE", "A history never changes")
    _refuse("escalation_history", "delete", "DELETE", "A history never changes")


def downgrade() -> None:
    bind = op.get_bind()
    full = sa.text("SELECT count(*) FROM adapter_version WHERE kind = 'full' AND state = 'ready'")
    if bind.execute(full).scalar_one():
        # the program before would look for their bytes on the engines of their base
        raise RuntimeError("close the escalations that have a full fine-tune first")
    for table, what in (("escalation_history", "delete"), ("escalation_history", "update"), ("escalation", "delete")):
        _drop_guard(table, what)
    _drop_guard("escalation", "fixed")
    for table in ("gateway_idempotency", "escalation_history", "escalation"):
        op.drop_table(table)
    op.drop_index("uq_adapter_version_escalation", "adapter_version")
    _refuse_other_values("adapter_version", CONTENT, "A version never changes its content")
    for name, _, _ in reversed(VERSION_COLUMNS):
        op.drop_column("adapter_version", name)


def _add_version_column(name: str, kind: str, check: str) -> None:
    """Add a column with its rule; the table is not rebuilt, so that on SQLite its triggers stay."""
    if _is_sqlite():
        _run(
            f"ALTER TABLE adapter_version ADD COLUMN {name} {kind} CONSTRAINT ck_adapter_version_{name} CHECK ({check})"
        )
        return
    _run(f"ALTER TABLE adapter_version ADD COLUMN {name} {kind.replace('JSON', 'JSONB')}")
    _run(f"ALTER TABLE adapter_version ADD CONSTRAINT ck_adapter_version_{name} CHECK ({check})")


def _create_escalation() -> None:
    op.create_table(
        "escalation",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("public_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("adapter", sa.String(length=63), nullable=False),
        sa.Column("base", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("figures", JSON, nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("requested_by", sa.String(length=200), nullable=False),
        sa.Column("requested_key", sa.String(length=40), nullable=False),
        sa.Column("requested_issuer", sa.String(length=200), nullable=True),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.Column("approval", JSON, nullable=True),
        sa.Column("owner", sa.String(length=200), nullable=True),
        sa.Column("budget_cents", sa.BigInteger(), nullable=True),
        sa.Column("currency", sa.String(length=3), nullable=True),
        sa.Column("review_at", INSTANT, nullable=True),
        sa.Column("on_overdue", sa.String(length=8), nullable=True),
        sa.Column("pool", sa.String(length=63), nullable=True),
        sa.Column("full_version", sa.Integer(), nullable=True),
        sa.Column("full_digest", sa.String(length=71), nullable=True),
        sa.Column("cost_cents", sa.BigInteger(), nullable=True),
        sa.Column("changed_at", INSTANT, nullable=False),
        sa.Column("held_by", sa.String(length=40), nullable=True),
        sa.Column("held_until", INSTANT, nullable=True),
        sa.CheckConstraint(f"state IN ({STATES})", name=op.f("ck_escalation_state")),
        sa.CheckConstraint("revision >= 1", name=op.f("ck_escalation_revision")),
        sa.CheckConstraint("expires_at > created_at", name=op.f("ck_escalation_expires_at")),
        sa.CheckConstraint(
            "(approval IS NULL) = (owner IS NULL) AND (approval IS NULL) = (budget_cents IS NULL) "
            "AND (approval IS NULL) = (review_at IS NULL) AND (approval IS NULL) = (on_overdue IS NULL)",
            name=op.f("ck_escalation_approval"),
        ),
        sa.CheckConstraint(
            "(pool IS NULL) = (full_version IS NULL) AND (pool IS NULL) = (full_digest IS NULL) "
            "AND (pool IS NULL) = (cost_cents IS NULL) AND (pool IS NULL OR approval IS NOT NULL)",
            name=op.f("ck_escalation_full"),
        ),
        sa.CheckConstraint(
            "(state NOT IN ('approved', 'registered', 'active', 'overdue') OR approval IS NOT NULL) "
            "AND (state NOT IN ('registered', 'active', 'overdue') OR pool IS NOT NULL)",
            name=op.f("ck_escalation_state_facts"),
        ),
        sa.CheckConstraint("on_overdue IN ('keep', 'revert')", name=op.f("ck_escalation_on_overdue")),
        sa.CheckConstraint("budget_cents >= 0 AND cost_cents >= 0", name=op.f("ck_escalation_amounts")),
        sa.CheckConstraint("(held_by IS NULL) = (held_until IS NULL)", name=op.f("ck_escalation_held")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_escalation")),
        sa.UniqueConstraint("public_id", name=op.f("uq_escalation_public_id")),
    )
    op.create_index(
        "uq_escalation_open",
        "escalation",
        ["adapter_id"],
        unique=True,
        sqlite_where=sa.text(OPEN),
        postgresql_where=sa.text(OPEN),
    )
    op.create_index("ix_escalation_tenant_id", "escalation", ["tenant_id", "id"])
    op.create_index("ix_escalation_state", "escalation", ["state", "id"])


def _create_escalation_history() -> None:
    op.create_table(
        "escalation_history",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("escalation_id", sa.Uuid(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("verb", sa.String(length=16), nullable=False),
        sa.Column("from_state", sa.String(length=16), nullable=True),
        sa.Column("to_state", sa.String(length=16), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("details", JSON, nullable=False),
        sa.CheckConstraint("revision >= 1", name=op.f("ck_escalation_history_revision")),
        sa.CheckConstraint("(revision = 1) = (from_state IS NULL)", name=op.f("ck_escalation_history_from_state")),
        sa.CheckConstraint("actor <> ''", name=op.f("ck_escalation_history_actor_form")),
        sa.ForeignKeyConstraint(
            ["escalation_id"], ["escalation.id"], name=op.f("fk_escalation_history_escalation_id_escalation")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_escalation_history")),
        sa.UniqueConstraint("escalation_id", "revision", name=op.f("uq_escalation_history_escalation_id_revision")),
    )


def _create_gateway_idempotency() -> None:
    op.create_table(
        "gateway_idempotency",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("route", sa.String(length=300), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=False),
        sa.Column("content", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.CheckConstraint("(status IS NULL) = (body IS NULL)", name=op.f("ck_gateway_idempotency_answer")),
        sa.CheckConstraint("status BETWEEN 200 AND 599", name=op.f("ck_gateway_idempotency_status")),
        sa.CheckConstraint("idempotency_key <> ''", name=op.f("ck_gateway_idempotency_key_form")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateway_idempotency")),
        sa.UniqueConstraint(
            "key_id", "route", "idempotency_key", name=op.f("uq_gateway_idempotency_key_id_route_idempotency_key")
        ),
    )
    op.create_index(op.f("ix_gateway_idempotency_created_at"), "gateway_idempotency", ["created_at"])


def _refuse_other_values(table: str, columns: str, message: str) -> None:
    """Refuse any other value of `columns` of a row that is there, instead of what was refused before."""
    if _has_guard(table, "fixed"):
        _drop_guard(table, "fixed")
    differs = "IS NOT" if _is_sqlite() else "IS DISTINCT FROM"
    _refuse(
        table, "fixed", "UPDATE", message, " OR ".join(f"NEW.{name} {differs} OLD.{name}" for name in columns.split())
    )


def _refuse(table: str, what: str, event: str, message: str, when: str = "1 = 1") -> None:
    """Refuse `event` on rows of `table`, as 0006 does."""
    name = f"guard_{table}_{what}"
    if _is_sqlite():
        _run(
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW WHEN {when} "
            f"BEGIN SELECT RAISE(ABORT, '{message}'); END"
        )
        return
    row = "OLD" if event == "DELETE" else "NEW"
    _run(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF {when} THEN "
        f"RAISE EXCEPTION '{message}' USING ERRCODE = 'check_violation', CONSTRAINT = '{name}'; "
        f"END IF; RETURN {row}; END $$"
    )
    _run(f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()")


def _has_guard(table: str, what: str) -> bool:
    known = (
        "SELECT count(*) FROM sqlite_master WHERE name = :name"
        if _is_sqlite()
        else ("SELECT count(*) FROM pg_proc WHERE proname = :name")
    )
    return bool(op.get_bind().execute(sa.text(known), {"name": f"guard_{table}_{what}"}).scalar_one())


def _drop_guard(table: str, what: str) -> None:
    name = f"guard_{table}_{what}"
    _run(f"DROP TRIGGER {name}" if _is_sqlite() else f"DROP FUNCTION {name}() CASCADE")


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


def _run(statement: str) -> None:
    """As it stands: a colon in it begins no parameter."""
    op.get_bind().exec_driver_sql(statement)
