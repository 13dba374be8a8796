"""Statistics: what each gateway saw in ten seconds and in a minute, kept for two hours."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009_stats"
down_revision = "0008_escalations"
branch_labels = None
depends_on = None
breaks_previous = False


def upgrade() -> None:
    op.create_table(
        "stats_piece",
        sa.Column("gateway", sa.String(length=40), nullable=False),
        sa.Column("span_s", sa.Integer(), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("minute", sa.DateTime(timezone=True), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("length(content) >= 1", name=op.f("ck_stats_piece_content")),
        sa.CheckConstraint("span_s IN (10, 60)", name=op.f("ck_stats_piece_span_s")),
        sa.PrimaryKeyConstraint("gateway", "span_s", "began_at", name=op.f("pk_stats_piece")),
    )
    op.create_index(op.f("ix_stats_piece_began_at"), "stats_piece", ["began_at"])


def downgrade() -> None:
    op.drop_table("stats_piece")
