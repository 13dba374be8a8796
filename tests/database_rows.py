"""One row of each table as SQL of both dialects, for tests of migrations and of the rules that a database holds."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

AT, LATER = "2026-01-01 00:00:00.000000", "2026-01-02 00:00:00.000000"
BASE_ID, ADAPTER_ID, ALIAS_ID, TENANT_ID = (f"{number:032x}" for number in range(1, 5))
DIGESTS = ["sha256:" + letter * 64 for letter in "abcdef"]


def target(number: int, weight: int = 100) -> dict[str, int]:
    """One target of an alias."""
    return {"version": number, "weight": weight}


def targets(*chosen: dict[str, int]) -> str:
    """Targets as the column holds them."""
    return json.dumps(list(chosen))


def version(number: int, state: str = "ready", **changes: Any) -> dict[str, Any]:
    """A version of the adapter."""
    retired_at = AT if state in ("retired", "purged") else None
    quarantine = json.dumps({"reason": "by_admin", "message": "x", "since": AT}) if state == "quarantined" else None
    fields = {
        "id": f"{number + 100:032x}", "adapter_id": ADAPTER_ID, "number": number, "kind": "lora",
        "digest": DIGESTS[number], "state": state, "rank": 2, "target_modules": '["q_proj"]', "num_parameters": 10,
        "size_bytes": 20, "files": "[]", "report": "{}", "created_at": AT, "created_by": "ada",
        "retired_at": retired_at, "quarantine": quarantine, "pending": None, "pool": None, "escalation": None,
        "replaced": None,
    }  # fmt: skip
    return fields | changes


def event(number: int, **changes: Any) -> dict[str, Any]:
    """An act."""
    fields = {
        "id": f"{number + 200:032x}", "public_id": f"evt_{number}", "at": AT, "action": "adapter.retired",
        "tenant_id": TENANT_ID, "tenant": "team-x", "subject": "team-x/a", "actor": "ada", "key_id": "key_1",
        "request_id": "req_1", "details": "{}",
    }  # fmt: skip
    return fields | changes


def history(number: int, chosen: str, **changes: Any) -> dict[str, Any]:
    """A revision of the alias."""
    fields = {
        "id": f"{number + 300:032x}", "alias_id": ALIAS_ID, "revision": number, "targets": chosen, "action": "set",
        "actor": "ada", "created_at": AT,
    }  # fmt: skip
    return fields | changes


_NAMED: dict[str, Any] = {
    "request_id": "req_1", "tenant_id": TENANT_ID, "tenant": "team-x", "adapter_id": ADAPTER_ID, "adapter": "a",
    "version": 1, "digest": DIGESTS[1], "base": "tiny", "key_id": "key_1", "route": "/v1/completions",
    "model": "team-x", "is_stream": False, "client_request_id": None, "tags": None, "created_at": AT,
    "replica": "http://e", "settled_at": LATER,
}  # fmt: skip
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("base", {
        "id": BASE_ID, "name": "tiny", "accepted_names": "[]", "fingerprint": "f", "weights_digest": "w",
        "architecture": "x", "vocab_size": 9, "modules": "{}", "max_lora_rank": 8, "default_context": 16,
        "max_saved_bytes": 2147483648, "matrix_hashes": "{}", "created_at": AT, "changed_epoch": 1,
    }),
    ("tenant", {
        "id": TENANT_ID, "name": "team-x", "display_name": None, "state": "active", "bases": None, "limits": None,
        "created_at": AT, "deleted_at": None, "changed_epoch": 1,
    }),
    ("api_key", {
        "id": f"{5:032x}", "public_id": "key_1", "lookup": "l", "secret_hmac": bytes(32), "tenant_id": TENANT_ID,
        "name": "k", "owner": "o", "role": "tenant", "scopes": "[]", "is_bootstrap": False, "created_at": AT,
        "created_by": "ada", "expires_at": LATER, "revoked_at": None, "changed_epoch": 1,
    }),
    ("adapter", {
        "id": ADAPTER_ID, "tenant_id": TENANT_ID, "tenant": "team-x", "name": "a", "base_id": BASE_ID,
        "is_default": True, "next_number": 6, "created_at": AT, "created_by": "ada", "deleted_at": None,
        "changed_epoch": 1,
    }),
    ("adapter_version", version(1)),
    ("adapter_version", version(2)),
    ("adapter_version", version(3, "retired")),
    ("adapter_version", version(4, "quarantined")),
    ("alias", {
        "id": ALIAS_ID, "adapter_id": ADAPTER_ID, "name": "live", "revision": 1, "targets": targets(target(1)),
        "updated_at": AT,
    }),
    ("alias_history", history(1, targets(target(1)))),
    ("registry_event", event(1)),
    ("gateway_event", event(2, action="tenant.created")),
    ("registry_idempotency", {
        "id": f"{6:032x}", "key_id": "key_1", "route": "r", "idempotency_key": "i", "content": None, "status": None,
        "body": None, "created_at": AT,
    }),
    ("request", _NAMED | {"tokens_seen": 3, "gateway": None}),
    ("usage", _NAMED | {
        "day": "2026-01-01", "outcome": "ok", "error_code": None, "finish": "stop", "prompt_tokens": 1,
        "cached_tokens": 0, "completion_tokens": 2, "queue_s": 0.5, "prefill_s": 0.5, "load_s": 0.0, "decode_s": 0.5,
        "preemptions": 0,
    }),
    ("adapter_upload", {
        "id": f"{7:032x}", "public_id": "upl_1", "tenant_id": TENANT_ID, "tenant": "team-x", "adapter": "a",
        "state": "open", "files": "[]", "options": "{}", "size_bytes": 1, "status": None, "body": None,
        "created_at": AT, "created_by": "ada", "touched_at": AT, "expires_at": LATER,
    }),
    ("version_outcome", {
        "adapter_id": ADAPTER_ID, "version": 1, "minute": AT, "outcome": "ok", "num_requests": 4,
    }),
    ("stats_piece", {"gateway": "gw_1", "span_s": 10, "began_at": AT, "minute": AT, "content": b"\x01"}),
    ("escalation", {
        "id": f"{8:032x}", "public_id": "esc_1", "tenant_id": TENANT_ID, "tenant": "team-x", "adapter_id": ADAPTER_ID,
        "adapter": "a", "base": "tiny", "version": 1, "digest": DIGESTS[1], "evidence": "{}", "figures": "{}",
        "reason": None, "requested_by": "ada", "requested_key": "key_1", "requested_issuer": None,
        "created_at": AT, "state": "requested", "revision": 1, "expires_at": LATER, "approval": None, "owner": None,
        "budget_cents": None, "currency": None, "review_at": None, "on_overdue": None, "pool": None,
        "full_version": None, "full_digest": None, "cost_cents": None, "changed_at": AT, "held_by": None,
        "held_until": None,
    }),
    ("escalation_history", {
        "id": f"{9:032x}", "escalation_id": f"{8:032x}", "revision": 1, "at": AT, "verb": "open", "from_state": None,
        "to_state": "requested", "actor": "ada", "key_id": "key_1", "request_id": "req_1", "details": "{}",
    }),
    ("gateway_idempotency", {
        "id": f"{10:032x}", "key_id": "key_1", "route": "r", "idempotency_key": "i", "content": "c", "status": None,
        "body": None, "created_at": AT,
    }),
    ("dashboard_session", {
        "id": f"{11:032x}", "token_hash": bytes(32), "key_id": "key_1", "role": "admin", "created_at": AT,
        "seen_at": AT, "expires_at": LATER,
    }),
    ("quota_debt", {"quota": "tokens_per_day:tenant:t", "period": 1, "carried": 0, "owed": 4, "at_ms": 1}),
)  # fmt: skip


def insert(connection: sa.Connection, table: str, row: dict[str, Any]) -> None:
    """Insert a row; columns that the table does not have (yet) are left out, of a missing table nothing is done."""
    inspector = sa.inspect(connection)
    if not inspector.has_table(table):
        return
    columns = [column["name"] for column in inspector.get_columns(table) if column["name"] in row]
    names, values = ", ".join(columns), ", ".join(f":{column}" for column in columns)
    connection.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({values})"), row)


def insert_all(connection: sa.Connection) -> None:
    """Insert a row into each table, and what it refers to."""
    for table, row in ROWS:
        insert(connection, table, row)


def read_all(connection: sa.Connection) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables, but those that belong to the migrations."""
    tables = sorted(set(sa.inspect(connection).get_table_names()) - {"alembic_version", "compatible_revision"})
    return {
        table: [dict(row) for row in connection.execute(sa.text(f"SELECT * FROM {table} ORDER BY 1, 2")).mappings()]
        for table in tables
    }
