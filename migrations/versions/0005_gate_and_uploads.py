"""Versions that wait for the parity gate, uploads in parts, limits of tenants, outcomes of versions by the minute."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005_gate_and_uploads"
down_revision = "0004_matrix_hashes"
branch_labels = None
depends_on = None
breaks_previous = False

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("tenant", sa.Column("limits", JSON, nullable=True))
    _mend_states()
    with op.batch_alter_table("adapter_version") as version:
        version.add_column(sa.Column("pending", JSON, nullable=True))
        version.create_check_constraint(
            op.f("ck_adapter_version_pending"), "(state = 'validating') = (pending IS NOT NULL)"
        )
        version.create_check_constraint(
            op.f("ck_adapter_version_quarantine"),
            "(state <> 'quarantined' OR quarantine IS NOT NULL) "
            "AND (quarantine IS NULL OR state IN ('quarantined', 'retired'))",
        )
    _create_adapter_upload()
    _create_version_outcome()


def downgrade() -> None:
    op.drop_table("version_outcome")
    op.drop_table("adapter_upload")
    # the program before knew no gate: nothing may wait for ever
    op.execute(sa.text("UPDATE adapter_version SET state = 'ready', pending = NULL WHERE state = 'validating'"))
    with op.batch_alter_table("adapter_version") as version:
        version.drop_constraint(op.f("ck_adapter_version_quarantine"), type_="check")
        version.drop_constraint(op.f("ck_adapter_version_pending"), type_="check")
        version.drop_column("pending")
    op.drop_column("tenant", "limits")


def _mend_states() -> None:
    """No program wrote other rows: nothing waits for a gate that is not there, and each quarantine has its reason."""
    version = sa.table("adapter_version", sa.column("state"), sa.column("quarantine", JSON))
    unknown = {"reason": "by_admin", "message": "Its reason is not known.", "since": datetime.now(UTC).isoformat()}
    is_quarantined = version.c.state == "quarantined"
    op.execute(sa.update(version).where(version.c.state == "validating").values(state="ready"))
    op.execute(sa.update(version).where(is_quarantined, version.c.quarantine.is_(None)).values(quarantine=unknown))
    op.execute(sa.update(version).where(~is_quarantined).values(quarantine=None))


def _create_adapter_upload() -> None:
    op.create_table(
        "adapter_upload",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("public_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("adapter", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("files", JSON, nullable=False),
        sa.Column("options", JSON, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("created_by", sa.String(length=200), nullable=False),
        sa.Column("touched_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.CheckConstraint(
            "state IN ('open', 'completing', 'completed', 'aborted')", name=op.f("ck_adapter_upload_state")
        ),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_adapter_upload_size_bytes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_upload")),
        sa.UniqueConstraint("public_id", name=op.f("uq_adapter_upload_public_id")),
    )
    op.create_index(op.f("ix_adapter_upload_tenant_id"), "adapter_upload", ["tenant_id"])
    op.create_index(op.f("ix_adapter_upload_expires_at"), "adapter_upload", ["expires_at"])


def _create_version_outcome() -> None:
    op.create_table(
        "version_outcome",
        sa.Column("adapter_id", sa.String(length=40), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("minute", INSTANT, nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("outcome IN ('ok', 'cancelled', 'error', 'lost')", name=op.f("ck_version_outcome_outcome")),
        sa.CheckConstraint("num_requests >= 1", name=op.f("ck_version_outcome_num_requests")),
        sa.PrimaryKeyConstraint("adapter_id", "version", "minute", "outcome", name=op.f("pk_version_outcome")),
    )
    op.create_index("ix_version_outcome_minute", "version_outcome", ["minute"])
