"""The registry's tables. Rows are written only by the services that own them; keys are UUIDv7.

What no CHECK can say is held by triggers of the migrations: events, histories and contents of versions never change,
revisions and epochs only grow, an alias targets versions that are there.

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
    alias_name_is_valid,
    answer_is_whole,
    digest_is_valid,
    name_is_valid,
)

METADATA = Row.metadata


class BaseRow(Row):
    """A base model; the fields of a `BaseSpec`. `modules` maps a module's path to its `ModuleSpec` as JSON."""

    __tablename__ = "base"
    __table_args__ = (
        name_is_valid(),
        sa.CheckConstraint("fingerprint <> ''", name="fingerprint_form"),
        sa.CheckConstraint("vocab_size >= 1", name="vocab_size"),
        sa.CheckConstraint("max_lora_rank >= 1", name="max_lora_rank"),
        sa.CheckConstraint("default_context >= 1", name="default_context"),
        sa.CheckConstraint("max_saved_bytes >= 0", name="max_saved_bytes"),
        sa.CheckConstraint("changed_epoch >= 1", name="changed_epoch"),
    )

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
        name_is_valid(),
        name_is_valid("tenant"),
        sa.CheckConstraint("changed_epoch >= 1", name="changed_epoch"),
        sa.CheckConstraint("deleted_at IS NULL OR NOT is_default", name="no_deleted_default"),
    )

    id: Mapped[Key]
    tenant_id: Mapped[PublicId]
    tenant: Mapped[Name]
    name: Mapped[Name]
    base_id: Mapped[uuid.UUID] = mapped_column(sa.ForeignKey("base.id"))
    is_default: Mapped[bool] = mapped_column(default=False)
    limits: Mapped[dict[str, Any] | None] = mapped_column(Json)
    next_number: Mapped[int]
    created_at: Mapped[Instant]
    created_by: Mapped[Actor]
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    changed_epoch: Mapped[Big] = mapped_column(index=True)

    base: Mapped[BaseRow] = relationship(lazy="joined")


class VersionRow(Row):
    """One immutable version; `files` says where each of its files lies inside the artifact of its digest.

    One of kind `full` has no files here: `pool` names the replicas that serve it, `escalation` the one that allows it,
    and `replaced`, while it has taken the place of others at the alias `live`, which (a `Replaced` as JSON).
    `quarantine` is a `Quarantine` as JSON while the state is `quarantined`, or `retired` from that, and None else;
    `pending` is what shall be done once it is ready (a `Pending` as JSON) while it is `validating`, and None else.
    `weights_digest` names the base's weights that it was found to answer well with, None if it was never compared.
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
        sa.Index(
            "uq_adapter_version_escalation",
            "escalation",
            unique=True,
            sqlite_where=sa.text("state NOT IN ('retired', 'purged')"),
            postgresql_where=sa.text("state NOT IN ('retired', 'purged')"),
        ),
        sa.CheckConstraint("kind IN ('lora', 'full')", name="kind"),
        sa.CheckConstraint("(kind = 'full') = (pool IS NOT NULL)", name="pool"),
        sa.CheckConstraint("(pool IS NULL) = (escalation IS NULL)", name="escalation"),
        sa.CheckConstraint("replaced IS NULL OR pool IS NOT NULL", name="replaced"),
        sa.CheckConstraint("number >= 1", name="number"),
        sa.CheckConstraint("(state = 'validating') = (pending IS NOT NULL)", name="pending"),
        sa.CheckConstraint(
            "(state <> 'quarantined' OR quarantine IS NOT NULL) "
            "AND (quarantine IS NULL OR state IN ('quarantined', 'retired'))",
            name="quarantine",
        ),
        sa.CheckConstraint("rank >= 0", name="rank"),
        sa.CheckConstraint("num_parameters >= 0", name="num_parameters"),
        sa.CheckConstraint("size_bytes >= 0", name="size_bytes"),
        sa.CheckConstraint(
            "(state <> 'retired' OR retired_at IS NOT NULL) "
            "AND (state NOT IN ('validating', 'ready') OR retired_at IS NULL)",
            name="retired_at",
        ),
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
    pending: Mapped[dict[str, Any] | None] = mapped_column(Json)
    pool: Mapped[str | None] = mapped_column(sa.String(63))
    escalation: Mapped[str | None] = mapped_column(sa.String(40))
    replaced: Mapped[dict[str, Any] | None] = mapped_column(Json)
    weights_digest: Mapped[str | None] = mapped_column(sa.String(128))

    adapter: Mapped[AdapterRow] = relationship(lazy="joined")


class UploadRow(Row):
    """A large upload whose parts arrive one by one, until it is completed, given up or its day is over.

    `files` are the files as the client announced them, with the size and sha256 of each part; `options` what the
    client asked for beside them. `state` `completing` is held by one request at a time, since `touched_at`.
    """

    __tablename__ = "adapter_upload"
    __table_args__ = (
        sa.CheckConstraint("state IN ('open', 'completing', 'completed', 'aborted')", name="state"),
        sa.CheckConstraint("size_bytes >= 0", name="size_bytes"),
        name_is_valid("adapter"),
        name_is_valid("tenant"),
        *answer_is_whole(),
        sa.CheckConstraint("expires_at > created_at", name="expires_at"),
    )

    id: Mapped[Key]
    public_id: Mapped[PublicId] = mapped_column(unique=True)
    tenant_id: Mapped[PublicId] = mapped_column(index=True)
    tenant: Mapped[Name]
    adapter: Mapped[Name]
    state: Mapped[str] = mapped_column(sa.String(16))
    files: Mapped[JsonList]
    options: Mapped[JsonDict]
    size_bytes: Mapped[Big]
    status: Mapped[int | None]
    body: Mapped[str | None] = mapped_column(sa.Text)
    created_at: Mapped[Instant]
    created_by: Mapped[Actor]
    touched_at: Mapped[Instant]
    expires_at: Mapped[Instant] = mapped_column(index=True)


class AliasRow(Row):
    """A movable name; no targets means that it is deleted, its row stays so that revisions never come back."""

    __tablename__ = "alias"
    __table_args__ = (
        sa.UniqueConstraint("adapter_id", "name"),
        alias_name_is_valid(),
        sa.CheckConstraint("revision >= 1", name="revision"),
    )

    id: Mapped[Key]
    adapter_id: Mapped[uuid.UUID] = mapped_column(sa.ForeignKey("adapter.id"))
    name: Mapped[str] = mapped_column(sa.String(32))
    revision: Mapped[int]
    targets: Mapped[JsonList]
    updated_at: Mapped[Instant]


class AliasHistoryRow(Row):
    """One revision of an alias: what it pointed to from then on, who did it and how."""

    __tablename__ = "alias_history"
    __table_args__ = (
        sa.UniqueConstraint("alias_id", "revision"),
        sa.CheckConstraint("revision >= 1", name="revision"),
        sa.CheckConstraint("action IN ('set', 'rollback', 'upload', 'delete')", name="action"),
        sa.CheckConstraint("actor <> ''", name="actor_form"),
    )

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
    __table_args__ = (
        sa.CheckConstraint("replace(action, '.', '') <> action", name="action_form"),
        sa.CheckConstraint("actor <> ''", name="actor_form"),
        sa.CheckConstraint("key_id <> ''", name="key_form"),
        *(
            sa.Index(f"ix_registry_event_{column}", column, "id")
            for column in ("tenant_id", "actor", "action", "subject", "key_id")
        ),
    )

    id: Mapped[Key]
    public_id: Mapped[PublicId] = mapped_column(unique=True)
    at: Mapped[Instant] = mapped_column(index=True)
    action: Mapped[str] = mapped_column(sa.String(64))
    tenant_id: Mapped[str | None] = mapped_column(sa.String(40))
    tenant: Mapped[str | None] = mapped_column(sa.String(63))
    subject: Mapped[str] = mapped_column(sa.String(300))
    actor: Mapped[Actor]
    key_id: Mapped[PublicId]
    request_id: Mapped[PublicId] = mapped_column(index=True)
    details: Mapped[JsonDict]


class EpochRow(Row):
    """The names epoch: one row, whose lock also puts the commits of names in order."""

    __tablename__ = "registry_epoch"
    __table_args__ = (
        sa.CheckConstraint("id = 1", name="one_row"),
        sa.CheckConstraint("epoch >= 1", name="epoch"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[Big]


class IdempotencyRow(Row):
    """An `Idempotency-Key` of one API key and route; without an answer it is still running."""

    __tablename__ = "registry_idempotency"
    __table_args__ = (
        sa.UniqueConstraint("key_id", "route", "idempotency_key"),
        *answer_is_whole(),
        sa.CheckConstraint("idempotency_key <> ''", name="key_form"),
    )

    id: Mapped[Key]
    key_id: Mapped[PublicId]
    route: Mapped[str] = mapped_column(sa.String(300))
    idempotency_key: Mapped[str] = mapped_column(sa.String(200))
    content: Mapped[str | None] = mapped_column(sa.String(64))
    status: Mapped[int | None]
    body: Mapped[str | None] = mapped_column(sa.Text)
    created_at: Mapped[Instant] = mapped_column(index=True)
