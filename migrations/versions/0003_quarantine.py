"""Why and since when a version is quarantined."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003_quarantine"
down_revision = "0002_gateway"
branch_labels = None
depends_on = None
breaks_previous = False

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("adapter_version", sa.Column("quarantine", JSON, nullable=True))


def downgrade() -> None:
    op.drop_column("adapter_version", "quarantine")
