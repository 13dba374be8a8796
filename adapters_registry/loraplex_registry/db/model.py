"""The registry's tables. Rows are written only by the services that own them; keys are UUIDv7.

`changed_epoch` of a base or adapter is the names epoch of its last change, so that gateways read only what changed.
Tenants belong to the gateway: their id and name are kept here as text, without a foreign key.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column, relationship

from loraplex_registry.db.column import (
    Actor,
    Big,
    Digest,
    Instant,
    Json,
    JsonDict,
    JsonList,
    Key,
    Name,
    PublicId,
    Row,
    UtcDateTime,
    digest_is_valid,
)

METADATA = Row.metadata


class BaseRow(Row):
    """A base model; the fields of a `BaseSpec`. `modules` maps a module's path to its `ModuleSpec` as JSON."""

    __tablename__ = "base"

    id: Mapped[Key]
    name: Mapped[Name] = mapped_column(unique=True)
    accepted_names: Mapped[JsonList]
    fingerprint: Mapped[str] = mapped_column(sa.String(128), unique=True)
    weights_digest: Mapped[str] = mapped_column(sa.String(128))
    architecture: Mapped[str] = mapped_column(sa.String(128))
    vocab_size: Mapped[int]
    modules: Mapped[JsonDict]
    max_lora_rank: Mapped[int]
    default_context: Mapped[int]
    max_saved_bytes: Mapped[Big]
    matrix_hashes: Mapped[JsonDict]
    created_at: Mapped[Instant]
    changed_epoch: Mapped[Big] = mapped_column(index=True)


class AdapterRow(Row):
    """An adapter of one tenant on one base; a deleted one keeps its row so that numbers continue under its name."""

    __tablename__ = "adapter"
    __table_args__ = (
        sa.Index(
            "uq_adapter_tenant_id_name",
            "tenant_id",
            "name",
            unique=True,
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        ),
        sa.Index(
            "uq_adapter_default",
            "tenant_id",
            unique=True,
            sqlite_where=sa.text("is_default"),
            postgresql_where=sa.text("is_default"),
        ),
        sa.CheckConstraint("next_number >= 1", name="next_number"),
    )

    id: Mapped[Key]
    tenant_id: Mapped[PublicId]
    tenant: Mapped[Name]
    name: Mapped[Name]
    base_id: Mapped[uuid.UUID] = mapped_column(sa.ForeignKey("base.id"))
    is_default: Mapped[bool] = mapped_column(default=False)
    next_number: Mapped[int]
    created_at: Mapped[Instant]
    created_by: Mapped[Actor]
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    changed_epoch: Mapped[Big] = mapped_column(index=True)

    base: Mapped[BaseRow] = relationship(lazy="joined")


class VersionRow(Row):
    """One immutable version; `files` says where each of its files lies inside the artifact of its digest.

    `quarantine` is a `Quarantine` as JSON while the state is `quarantined`, and None else.
    """

    __tablename__ = "adapter_version"
    __table_args__ = (
        sa.UniqueConstraint("adapter_id", "number"),
        # What was purged may come again, under a new number.
        sa.Index(
            "uq_adapter_version_adapter_id_digest",
            "adapter_id",
            "digest",
            unique=True,
            sqlite_where=sa.text("state <> 'purged'"),
            postgresql_where=sa.text("state <> 'purged'"),
        ),
        digest_is_valid("digest"),
        sa.CheckConstraint("state IN ('validating', 'ready', 'quarantined', 'retired', 'purged')", name="state"),
        sa.CheckConstraint("kind IN ('lora', 'full')", name="kind"),
        sa.CheckConstraint("number >= 1", name="number"),
    )

    id: Mapped[Key]
    adapter_id: Mapped[uuid.UUID] = mapped_column(sa.ForeignKey("adapter.id"))
    number: Mapped[int]
    kind: Mapped[str] = mapped_column(sa.String(8))
    digest: Mapped[Digest] = mapped_column(index=True)
    state: Mapped[str] = mapped_column(sa.String(16))
    rank: Mapped[int]
    target_modules: Mapped[JsonList]
    num_parameters: Mapped[Big]
    size_bytes: Mapped[Big]
    files: Mapped[JsonList]
    report: Mapped[JsonDict]
    created_at: Mapped[Instant]
    created_by: Mapped[Actor]
    retired_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    quarantine: Mapped[dict[str, Any] | None] = mapped_column(Json)

    adapter: Mapped[AdapterRow] = relationship(lazy="joined")


class AliasRow(Row):
    """A movable name; no targets means that it is deleted, its row stays so that revisions never come back."""

    __tablename__ = "alias"
    __table_args__ = (sa.UniqueConstraint("adapter_id", "name"),)

    id: Mapped[Key]
    adapter_id: Mapped[uuid.UUID] = mapped_column(sa.ForeignKey("adapter.id"))
    name: Mapped[str] = mapped_column(sa.String(32))
    revision: Mapped[int]
    targets: Mapped[JsonList]
    updated_at: Mapped[Instant]


class AliasHistoryRow(Row):
    """One revision of an alias: what it pointed to from then on, who did it and how."""

    __tablename__ = "alias_history"
    __table_args__ = (sa.UniqueConstraint("alias_id", "revision"),)

    id: Mapped[Key]
    alias_id: Mapped[uuid.UUID] = mapped_column(sa.ForeignKey("alias.id"))
    revision: Mapped[int]
    targets: Mapped[JsonList]
    action: Mapped[str] = mapped_column(sa.String(16))
    actor: Mapped[Actor]
    created_at: Mapped[Instant]


class EventRow(Row):
    """One act, written in the transaction of its change; the gateway's events have the same columns."""

    __tablename__ = "registry_event"

    id: Mapped[Key]
    public_id: Mapped[PublicId] = mapped_column(unique=True)
    at: Mapped[Instant] = mapped_column(index=True)
    action: Mapped[str] = mapped_column(sa.String(64))
    tenant_id: Mapped[str | None] = mapped_column(sa.String(40))
    tenant: Mapped[str | None] = mapped_column(sa.String(63))
    subject: Mapped[str] = mapped_column(sa.String(300))
    actor: Mapped[Actor]
    key_id: Mapped[PublicId]
    request_id: Mapped[PublicId]
    details: Mapped[JsonDict]


class EpochRow(Row):
    """The names epoch: one row, whose lock also puts the commits of names in order."""

    __tablename__ = "registry_epoch"
    __table_args__ = (sa.CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[Big]


class IdempotencyRow(Row):
    """An `Idempotency-Key` of one API key and route; without an answer it is still running."""

    __tablename__ = "registry_idempotency"
    __table_args__ = (sa.UniqueConstraint("key_id", "route", "idempotency_key"),)

    id: Mapped[Key]
    key_id: Mapped[PublicId]
    route: Mapped[str] = mapped_column(sa.String(300))
    idempotency_key: Mapped[str] = mapped_column(sa.String(200))
    content: Mapped[str | None] = mapped_column(sa.String(64))
    status: Mapped[int | None]
    body: Mapped[str | None] = mapped_column(sa.Text)
    created_at: Mapped[Instant] = mapped_column(index=True)
