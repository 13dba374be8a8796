"""What a base's embedding and head hash to in each dtype, and how much of them an adapter may bring of its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004_matrix_hashes"
down_revision = "0003_quarantine"
branch_labels = None
depends_on = None
breaks_previous = False

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("base", sa.Column("max_saved_bytes", sa.BigInteger(), nullable=False, server_default="2147483648"))
    op.add_column("base", sa.Column("matrix_hashes", JSON, nullable=False, server_default="{}"))


def downgrade() -> None:
    op.drop_column("base", "matrix_hashes")
    op.drop_column("base", "max_saved_bytes")
