"""Which weights a version was compared on by the parity gate."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011_measured_weights"
down_revision = "0010_dashboard_sessions"
branch_labels = None
depends_on = None
breaks_previous = False


def upgrade() -> None:
    op.add_column("adapter_version", sa.Column("weights_digest", sa.String(128), nullable=True))


def downgrade() -> None:
    op.drop_column("adapter_version", "weights_digest")
