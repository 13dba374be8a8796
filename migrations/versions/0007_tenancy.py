"""Weights of tenants; limits, priority, last use, rotation of keys; limits of adapters; bytes that requests loaded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007_tenancy"
down_revision = "0006_rules_in_the_database"
branch_labels = None
depends_on = None
breaks_previous = False

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    with op.batch_alter_table("tenant") as tenant:
        tenant.add_column(sa.Column("weight", sa.Integer(), nullable=True))
        tenant.create_check_constraint(op.f("ck_tenant_weight"), "weight BETWEEN 1 AND 1000")
    with op.batch_alter_table("api_key") as key:
        key.add_column(sa.Column("limits", JSON, nullable=True))
        key.add_column(sa.Column("priority", sa.Integer(), nullable=True))
        key.add_column(sa.Column("last_used_at", INSTANT, nullable=True))
        key.add_column(sa.Column("rotated_from", sa.String(length=40), nullable=True))
        key.create_check_constraint(op.f("ck_api_key_priority"), "priority BETWEEN -8 AND 8")
    # not rebuilt, so that on SQLite their triggers stay
    op.add_column("adapter", sa.Column("limits", JSON, nullable=True))
    op.add_column("usage", sa.Column("load_bytes", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("usage", "load_bytes")
    op.drop_column("adapter", "limits")
    with op.batch_alter_table("api_key") as key:
        key.drop_constraint(op.f("ck_api_key_priority"), type_="check")
        for name in ("rotated_from", "last_used_at", "priority", "limits"):
            key.drop_column(name)
    with op.batch_alter_table("tenant") as tenant:
        tenant.drop_constraint(op.f("ck_tenant_weight"), type_="check")
        tenant.drop_column("weight")
