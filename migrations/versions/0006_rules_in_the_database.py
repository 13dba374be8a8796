"""The rules of rows, held by the database: names, states, numbers, and what never changes; the gateway of a request.

Triggers hold what no CHECK can say: events, histories and contents of versions never change, epochs and revisions
only grow, an alias targets versions that are there. A later revision that rebuilds one of these tables on SQLite
(`batch_alter_table`) drops the triggers before and makes them again after: `_drop_guards`, `_create_guards`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa
from alembic import op

revision = "0006_rules_in_the_database"
down_revision = "0005_gate_and_uploads"
branch_labels = None
depends_on = None
breaks_previous = False

INSTANT = sa.DateTime(timezone=True)
AUDIT_VIEW = """CREATE VIEW audit_event AS
SELECT id, public_id, at, action, tenant_id, tenant, subject, actor, key_id, request_id, details FROM registry_event
UNION ALL
SELECT id, public_id, at, action, tenant_id, tenant, subject, actor, key_id, request_id, details FROM gateway_event"""
EVENT_TABLES = ("registry_event", "gateway_event")
EVENT_INDEXES = (("tenant_id", "id"), ("actor", "id"), ("action", "id"), ("subject", "id"), ("key_id", "id"))
NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789-"


def _name(column: str) -> str:
    return (
        f"length({column}) BETWEEN 1 AND 63 AND ltrim({column}, '{NAME_CHARACTERS}') = '' "
        f"AND substr({column}, 1, 1) <> '-' AND substr({column}, length({column}), 1) <> '-'"
    )


EVENT_CHECKS = (
    ("action_form", "replace(action, '.', '') <> action"),
    ("actor_form", "actor <> ''"),
    ("key_form", "key_id <> ''"),
)
CHECKS: dict[str, tuple[tuple[str, str], ...]] = {
    "base": (
        ("name_form", _name("name")),
        ("fingerprint_form", "fingerprint <> ''"),
        ("vocab_size", "vocab_size >= 1"),
        ("max_lora_rank", "max_lora_rank >= 1"),
        ("default_context", "default_context >= 1"),
        ("max_saved_bytes", "max_saved_bytes >= 0"),
        ("changed_epoch", "changed_epoch >= 1"),
    ),
    "adapter": (
        ("name_form", _name("name")),
        ("tenant_form", _name("tenant")),
        ("changed_epoch", "changed_epoch >= 1"),
        ("no_deleted_default", "deleted_at IS NULL OR NOT is_default"),
    ),
    "adapter_version": (
        ("rank", "rank >= 0"),
        ("num_parameters", "num_parameters >= 0"),
        ("size_bytes", "size_bytes >= 0"),
        (
            "retired_at",
            (
                "(state <> 'retired' OR retired_at IS NOT NULL) "
                "AND (state NOT IN ('validating', 'ready') OR retired_at IS NULL)"
            ),
        ),
    ),
    "adapter_upload": (
        ("adapter_form", _name("adapter")),
        ("tenant_form", _name("tenant")),
        ("answer", "(status IS NULL) = (body IS NULL)"),
        ("status", "status BETWEEN 200 AND 599"),
        ("expires_at", "expires_at > created_at"),
    ),
    "alias": (
        (
            "name_form",
            (
                f"length(name) BETWEEN 1 AND 32 AND ltrim(name, '{NAME_CHARACTERS}') = '' "
                "AND substr(name, 1, 1) BETWEEN 'a' AND 'z'"
            ),
        ),
        ("revision", "revision >= 1"),
    ),
    "alias_history": (
        ("revision", "revision >= 1"),
        ("action", "action IN ('set', 'rollback', 'upload', 'delete')"),
        ("actor_form", "actor <> ''"),
    ),
    "registry_event": EVENT_CHECKS,
    "gateway_event": EVENT_CHECKS,
    "registry_epoch": (("epoch", "epoch >= 1"),),
    "gateway_epoch": (("epoch", "epoch >= 1"),),
    "registry_idempotency": (
        ("answer", "(status IS NULL) = (body IS NULL)"),
        ("status", "status BETWEEN 200 AND 599"),
        ("key_form", "idempotency_key <> ''"),
    ),
    "tenant": (
        ("name_form", _name("name")),
        ("deleted_at", "(state = 'deleted') = (deleted_at IS NOT NULL)"),
        ("changed_epoch", "changed_epoch >= 1"),
    ),
    "api_key": (
        ("secret_hmac", "length(secret_hmac) = 32"),
        ("tenant_of_role", "role <> 'tenant' OR tenant_id IS NOT NULL"),
        ("bootstrap", "NOT is_bootstrap OR (role = 'admin' AND tenant_id IS NULL)"),
        ("expires_at", "expires_at > created_at"),
        ("changed_epoch", "changed_epoch >= 1"),
    ),
    "request": (("tokens_seen", "tokens_seen >= 0"),),
}


class Guard(NamedTuple):
    """A trigger that refuses: before `event` on `table`, where `refuses` holds (SQL of both dialects, or a pair)."""

    table: str
    what: str
    event: str
    message: str
    refuses: str | tuple[str, str] = "1 = 1"

    @property
    def name(self) -> str:
        """Its name in the database; on Postgres its function has the same one."""
        return f"guard_{self.table}_{self.what}"


def _fixed(table: str, columns: str, message: str) -> Guard:
    """Refuse any other value of `columns` of a row that is there."""
    names = columns.split()
    sqlite, postgres = (
        " OR ".join(f"NEW.{name} {differs} OLD.{name}" for name in names) for differs in ("IS NOT", "IS DISTINCT FROM")
    )
    return Guard(table, "fixed", "UPDATE", message, (sqlite, postgres))


_TARGETS_SQLITE = """json_type(NEW.targets) <> 'array' OR json_array_length(NEW.targets) > 8
 OR (json_array_length(NEW.targets) > 0 AND (
  SELECT sum(json_extract(target.value, '$.weight')) <> 100
   OR min(json_extract(target.value, '$.weight')) < 1
   OR max(json_type(target.value, '$.weight') <> 'integer')
   OR count(DISTINCT json_extract(target.value, '$.version')) <> count(*)
   OR count(version.id) <> count(*)
  FROM json_each(NEW.targets) AS target LEFT JOIN adapter_version AS version
   ON version.adapter_id = NEW.adapter_id AND version.state <> 'purged'
   AND version.number = json_extract(target.value, '$.version')))"""
_TARGETS_POSTGRES = """jsonb_typeof(NEW.targets) <> 'array' OR jsonb_array_length(NEW.targets) > 8
 OR (jsonb_array_length(NEW.targets) > 0 AND (
  SELECT sum((target.value ->> 'weight')::integer) <> 100
   OR min((target.value ->> 'weight')::integer) < 1
   OR count(DISTINCT target.value ->> 'version') <> count(*)
   OR count(version.id) <> count(*)
  FROM jsonb_array_elements(NEW.targets) AS target(value) LEFT JOIN adapter_version AS version
   ON version.adapter_id = NEW.adapter_id AND version.state <> 'purged'
   AND version.number = (target.value ->> 'version')::integer))"""
_TARGETED = (
    """NEW.state IN ('retired', 'purged') AND EXISTS (
  SELECT 1 FROM alias, json_each(alias.targets) AS target
  WHERE alias.adapter_id = NEW.adapter_id AND json_extract(target.value, '$.version') = NEW.number)""",
    """NEW.state IN ('retired', 'purged') AND EXISTS (
  SELECT 1 FROM alias WHERE alias.adapter_id = NEW.adapter_id
  AND alias.targets @> jsonb_build_array(jsonb_build_object('version', NEW.number)))""",
)
_BAD_STATE = "(OLD.state = 'purged' AND NEW.state <> 'purged') OR (NEW.state = 'validating' AND OLD.state <> NEW.state)"
_NUMBER_NOT_TAKEN = """NOT EXISTS (
  SELECT 1 FROM adapter WHERE adapter.id = NEW.adapter_id AND NEW.number < adapter.next_number)"""
_NOT_NEXT = """NOT EXISTS (
  SELECT 1 FROM alias WHERE alias.id = NEW.alias_id AND alias.revision = NEW.revision AND alias.targets = NEW.targets)
 OR (NEW.revision > 1 AND NOT EXISTS (
  SELECT 1 FROM alias_history AS former WHERE former.alias_id = NEW.alias_id AND former.revision = NEW.revision - 1))"""
_BAD_MOVE = "NOT (NEW.revision = OLD.revision + 1 OR (NEW.revision = OLD.revision AND NEW.targets = OLD.targets))"
_RECENT = ("OLD.at > strftime('%Y-%m-%d %H:%M:%f', 'now', '-30 days')", "OLD.at > now() - interval '30 days'")
_CONTENT = "id adapter_id number kind digest rank target_modules num_parameters size_bytes files created_at created_by"

GUARDS = (
    *(Guard(table, "update", "UPDATE", "Events never change") for table in EVENT_TABLES),
    *(Guard(table, "delete", "DELETE", "Events stay for 30 days", _RECENT) for table in EVENT_TABLES),
    _fixed("adapter", "id tenant_id name base_id created_at created_by", "An adapter keeps its tenant, name and base"),
    Guard("adapter", "number", "UPDATE", "Version numbers never come back", "NEW.next_number < OLD.next_number"),
    Guard("adapter", "delete", "DELETE", "The row of a deleted adapter stays"),
    _fixed("adapter_version", _CONTENT, "A version never changes its content"),
    Guard("adapter_version", "state", "UPDATE", "No way leads from that state to this one", _BAD_STATE),
    Guard("adapter_version", "targeted", "UPDATE", "An alias targets this version", _TARGETED),
    Guard("adapter_version", "number", "INSERT", "That version number is not given out", _NUMBER_NOT_TAKEN),
    Guard("adapter_version", "delete", "DELETE", "The row of a version stays"),
    _fixed("alias", "id adapter_id name", "An alias keeps its adapter and name"),
    Guard("alias", "first", "INSERT", "Revisions begin at 1", "NEW.revision <> 1"),
    Guard("alias", "revision", "UPDATE", "Each change of an alias is its next revision", _BAD_MOVE),
    Guard("alias", "new_targets", "INSERT", "Targets are versions whose weights sum to 100",
          (_TARGETS_SQLITE, _TARGETS_POSTGRES)),
    Guard("alias", "targets", "UPDATE OF targets", "Targets are versions whose weights sum to 100",
          (_TARGETS_SQLITE, _TARGETS_POSTGRES)),
    Guard("alias", "delete", "DELETE", "The row of a deleted alias stays"),
    Guard("alias_history", "next", "INSERT", "A history is a line, and ends with what the alias is", _NOT_NEXT),
    Guard("alias_history", "update", "UPDATE", "A history never changes"),
    Guard("alias_history", "delete", "DELETE", "A history never changes"),
    Guard("registry_epoch", "grows", "UPDATE", "Epochs grow", "NEW.epoch <= OLD.epoch"),
    Guard("registry_epoch", "delete", "DELETE", "Epochs grow"),
    Guard("gateway_epoch", "grows", "UPDATE", "Epochs grow", "NEW.epoch <= OLD.epoch"),
    Guard("gateway_epoch", "delete", "DELETE", "Epochs grow"),
    Guard("usage", "update", "UPDATE", "Usage never changes"),
)  # fmt: skip


def upgrade() -> None:
    op.execute(sa.text("DROP VIEW audit_event"))
    _mend_rows()
    for table, checks in CHECKS.items():
        with op.batch_alter_table(table) as batch:
            if table == "request":
                batch.add_column(sa.Column("gateway", sa.String(length=40), nullable=True))
            for name, text in checks:
                batch.create_check_constraint(op.f(f"ck_{table}_{name}"), text)
            if table == "api_key":
                batch.create_foreign_key(op.f("fk_api_key_tenant_id_tenant"), "tenant", ["tenant_id"], ["id"])
            if table == "base":
                batch.alter_column("max_saved_bytes", existing_type=sa.BigInteger(), server_default=None)
                batch.alter_column("matrix_hashes", server_default=None)
    for table in EVENT_TABLES:
        for columns in EVENT_INDEXES:
            op.create_index(f"ix_{table}_{columns[0]}", table, columns)
        op.create_index(f"ix_{table}_request_id", table, ["request_id"])
    op.execute(sa.text(AUDIT_VIEW))
    _create_guards()


def downgrade() -> None:
    _drop_guards()
    op.execute(sa.text("DROP VIEW audit_event"))
    for table in EVENT_TABLES:
        op.drop_index(f"ix_{table}_request_id", table)
        for columns in EVENT_INDEXES:
            op.drop_index(f"ix_{table}_{columns[0]}", table)
    for table, checks in reversed(CHECKS.items()):
        with op.batch_alter_table(table) as batch:
            if table == "api_key":
                batch.drop_constraint(op.f("fk_api_key_tenant_id_tenant"), type_="foreignkey")
            for name, _ in checks:
                batch.drop_constraint(op.f(f"ck_{table}_{name}"), type_="check")
            if table == "request":
                batch.drop_column("gateway")
            if table == "base":
                batch.alter_column("max_saved_bytes", existing_type=sa.BigInteger(), server_default="2147483648")
                batch.alter_column("matrix_hashes", server_default="{}")
    op.execute(sa.text(AUDIT_VIEW))


def _mend_rows() -> None:
    """Bring rows into the form that every program has written; only hands can have made them otherwise."""
    version = sa.table("adapter_version", sa.column("state"), sa.column("retired_at", INSTANT))
    tenant = sa.table("tenant", sa.column("state"), sa.column("deleted_at", INSTANT))
    now = datetime.now(UTC)
    is_undated = (version.c.state == "retired") & version.c.retired_at.is_(None)
    op.execute(sa.update(version).where(is_undated).values(retired_at=now))
    is_callable = version.c.state.in_(("validating", "ready")) & version.c.retired_at.is_not(None)
    op.execute(sa.update(version).where(is_callable).values(retired_at=None))
    op.execute(
        sa.update(tenant).where(tenant.c.state == "deleted", tenant.c.deleted_at.is_(None)).values(deleted_at=now)
    )
    op.execute(
        sa.update(tenant).where(tenant.c.state != "deleted", tenant.c.deleted_at.is_not(None)).values(state="deleted")
    )


def _create_guards() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for guard in GUARDS:
        refuses = guard.refuses if isinstance(guard.refuses, str) else guard.refuses[not is_sqlite]
        if is_sqlite:
            _run(
                f"CREATE TRIGGER {guard.name} BEFORE {guard.event} ON {guard.table} FOR EACH ROW "
                f"WHEN {refuses} BEGIN SELECT RAISE(ABORT, '{guard.message}'); END"
            )
            continue
        row = "OLD" if guard.event == "DELETE" else "NEW"
        _run(
            f"CREATE FUNCTION {guard.name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF {refuses} THEN "
            f"RAISE EXCEPTION '{guard.message}' USING ERRCODE = 'check_violation', CONSTRAINT = '{guard.name}'; "
            f"END IF; RETURN {row}; END $$"
        )
        _run(
            f"CREATE TRIGGER {guard.name} BEFORE {guard.event} ON {guard.table} "
            f"FOR EACH ROW EXECUTE FUNCTION {guard.name}()"
        )
    if not is_sqlite:
        for table in (*EVENT_TABLES, "alias_history"):
            # refuses whatever happens, and looks at no row
            _run(
                f"CREATE TRIGGER guard_{table}_truncate BEFORE TRUNCATE ON {table} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION guard_{table}_update()"
            )


def _drop_guards() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for guard in GUARDS:
        _run(f"DROP TRIGGER {guard.name}" if is_sqlite else f"DROP FUNCTION {guard.name}() CASCADE")


def _run(statement: str) -> None:
    """As it stands: a colon in it begins no parameter."""
    op.get_bind().exec_driver_sql(statement)
