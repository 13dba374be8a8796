"""Sessions of the dashboard: whom a browser's random token stands for, until when."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010_dashboard_sessions"
down_revision = "0009_stats"
branch_labels = None
depends_on = None
breaks_previous = False

INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "dashboard_session",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("seen_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.CheckConstraint("length(token_hash) = 32", name=op.f("ck_dashboard_session_token_hash")),
        sa.CheckConstraint("role IN ('tenant', 'admin', 'admin_readonly')", name=op.f("ck_dashboard_session_role")),
        sa.CheckConstraint("expires_at > created_at", name=op.f("ck_dashboard_session_expires_at")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dashboard_session")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_dashboard_session_token_hash")),
    )
    op.create_index(op.f("ix_dashboard_session_key_id"), "dashboard_session", ["key_id"])


def downgrade() -> None:
    op.drop_table("dashboard_session")
