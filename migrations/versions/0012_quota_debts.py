"""What days and months owe to the next ones, so that a restart forgets none of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012_quota_debts"
down_revision = "0011_measured_weights"
branch_labels = None
depends_on = None
breaks_previous = False


def upgrade() -> None:
    op.create_table(
        "quota_debt",
        sa.Column("quota", sa.String(length=120), nullable=False),
        sa.Column("period", sa.Integer(), nullable=False),
        sa.Column("carried", sa.BigInteger(), nullable=False),
        sa.Column("owed", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("carried >= 0 AND owed >= 0", name=op.f("ck_quota_debt_amounts")),
        sa.PrimaryKeyConstraint("quota", name=op.f("pk_quota_debt")),
    )


def downgrade() -> None:
    op.drop_table("quota_debt")
