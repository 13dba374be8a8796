"""What the database itself refuses, whatever the code says: each rule has a row that breaks it and alone does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from database_rows import (
    ADAPTER_ID,
    ALIAS_ID,
    AT,
    DIGESTS,
    ROWS,
    event,
    history,
    insert,
    insert_all,
    target,
    targets,
    version,
)

BOTH = targets(target(1, 90), target(2, 10))
ROW_OF = {table: row for table, row in ROWS if table != "adapter_version"} | {"adapter_version": version(5)}


@pytest.fixture
def connection(database_url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(database_url.replace("sqlite+aiosqlite", "sqlite"), poolclass=sa.NullPool)
    with engine.connect() as connected:
        if connected.dialect.name == "sqlite":
            connected.exec_driver_sql("PRAGMA foreign_keys=ON")
        insert_all(connected)
        connected.commit()
        yield connected


def _run(connection: sa.Connection, statement: str, **values: Any) -> None:
    with connection.begin_nested() if connection.in_transaction() else connection.begin():
        connection.execute(sa.text(statement), values)


def _refuses(connection: sa.Connection, statement: str, **values: Any) -> str:
    with pytest.raises(sa.exc.IntegrityError) as caught:
        _run(connection, statement, **values)
    connection.rollback()
    return str(caught.value.orig)


BAD_VALUES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("base", {"name": "Tiny"}, "ck_base_name_form"),
    ("base", {"name": "-tiny"}, "ck_base_name_form"),
    ("base", {"fingerprint": ""}, "ck_base_fingerprint_form"),
    ("base", {"vocab_size": 0}, "ck_base_vocab_size"),
    ("base", {"max_lora_rank": 0}, "ck_base_max_lora_rank"),
    ("base", {"default_context": 0}, "ck_base_default_context"),
    ("base", {"max_saved_bytes": -1}, "ck_base_max_saved_bytes"),
    ("adapter", {"name": "a_b"}, "ck_adapter_name_form"),
    ("adapter", {"name": "a-"}, "ck_adapter_name_form"),
    ("adapter", {"tenant": ""}, "ck_adapter_tenant_form"),
    ("adapter", {"next_number": 0}, "ck_adapter_next_number"),
    ("adapter", {"changed_epoch": 0}, "ck_adapter_changed_epoch"),
    ("adapter", {"deleted_at": AT}, "ck_adapter_no_deleted_default"),
    ("adapter_version", {"digest": "sha256:" + "A" * 64}, "ck_adapter_version_digest_format"),
    ("adapter_version", {"digest": "sha256:" + "a" * 63}, "ck_adapter_version_digest_format"),
    ("adapter_version", {"digest": "sha512:" + "a" * 64}, "ck_adapter_version_digest_format"),
    ("adapter_version", {"state": "failed"}, "ck_adapter_version_state"),
    ("adapter_version", {"kind": "other"}, "ck_adapter_version_kind"),
    ("adapter_version", {"number": 0}, "ck_adapter_version_number"),
    ("adapter_version", {"rank": -1}, "ck_adapter_version_rank"),
    ("adapter_version", {"size_bytes": -1}, "ck_adapter_version_size_bytes"),
    ("adapter_version", {"num_parameters": -1}, "ck_adapter_version_num_parameters"),
    ("adapter_version", {"retired_at": AT}, "ck_adapter_version_retired_at"),
    ("adapter_version", {"state": "retired"}, "ck_adapter_version_retired_at"),
    ("adapter_version", {"state": "validating"}, "ck_adapter_version_pending"),
    ("adapter_version", {"state": "quarantined"}, "ck_adapter_version_quarantine"),
    ("adapter_version", {"number": 6}, "number is not given out"),
    ("alias", {"name": "1st"}, "ck_alias_name_form"),
    ("alias", {"name": "x" * 33}, "ck_alias_name_form|too long"),
    ("alias", {"name": "beta", "revision": 2}, "Revisions begin at 1"),
    ("alias_history", {"revision": 3}, "A history is a line"),
    ("registry_event", {"action": "nothing"}, "ck_registry_event_action_form"),
    ("registry_event", {"actor": ""}, "ck_registry_event_actor_form"),
    ("gateway_event", {"key_id": ""}, "ck_gateway_event_key_form"),
    ("registry_idempotency", {"status": 201}, "ck_registry_idempotency_answer"),
    ("registry_idempotency", {"status": 20, "body": ""}, "ck_registry_idempotency_status"),
    ("adapter_upload", {"expires_at": AT}, "ck_adapter_upload_expires_at"),
    ("adapter_upload", {"body": "{}"}, "ck_adapter_upload_answer"),
    ("adapter_upload", {"state": "lost"}, "ck_adapter_upload_state"),
    ("tenant", {"name": "team_y"}, "ck_tenant_name_form"),
    ("tenant", {"state": "deleted"}, "ck_tenant_deleted_at"),
    ("api_key", {"secret_hmac": bytes(31)}, "ck_api_key_secret_hmac"),
    ("api_key", {"tenant_id": None}, "ck_api_key_tenant_of_role"),
    ("api_key", {"is_bootstrap": True}, "ck_api_key_bootstrap"),
    ("api_key", {"expires_at": AT}, "ck_api_key_expires_at"),
    ("api_key", {"tenant_id": "f" * 32}, "(?i)foreign key"),
    ("request", {"tokens_seen": -1}, "ck_request_tokens_seen"),
    ("adapter_version", {"kind": "full"}, "ck_adapter_version_pool"),
    ("adapter_version", {"pool": "big", "escalation": "esc_1"}, "ck_adapter_version_pool"),
    ("adapter_version", {"escalation": "esc_1"}, "ck_adapter_version_escalation"),
    ("adapter_version", {"replaced": "{}"}, "ck_adapter_version_replaced"),
    ("escalation", {"state": "lost"}, "ck_escalation_state"),
    ("escalation", {"state": "approved"}, "ck_escalation_state_facts"),
    ("escalation", {"owner": "ada"}, "ck_escalation_approval"),
    ("escalation", {"pool": "big"}, "ck_escalation_full"),
    ("escalation", {"expires_at": AT}, "ck_escalation_expires_at"),
    ("escalation", {}, "uq_escalation_open|UNIQUE constraint failed: escalation.adapter_id"),
    ("escalation_history", {"revision": 2}, "ck_escalation_history_from_state"),
    ("gateway_idempotency", {"status": 200}, "ck_gateway_idempotency_answer"),
    ("version_outcome", {"num_requests": 0}, "ck_version_outcome_num_requests"),
    ("dashboard_session", {"token_hash": bytes(31)}, "ck_dashboard_session_token_hash"),
    ("dashboard_session", {"role": "engine"}, "ck_dashboard_session_role"),
    ("dashboard_session", {"expires_at": AT}, "ck_dashboard_session_expires_at"),
    ("quota_debt", {"owed": -1}, "ck_quota_debt_amounts"),
    ("dashboard_session", {}, "uq_dashboard_session_token_hash|UNIQUE constraint failed: dashboard_session.token_hash"),
)


def test_a_row_that_breaks_a_rule_is_refused(connection: sa.Connection) -> None:
    others = {"public_id": "other", "lookup": "other", "request_id": "other", "idempotency_key": "other"}
    others["id"] = f"{999:032x}"
    for table, change, rule in BAD_VALUES:
        row = ROW_OF[table] | {name: value for name, value in others.items() if name in ROW_OF[table]} | change
        failures = (sa.exc.IntegrityError, sa.exc.DataError)
        with pytest.raises(failures, match=rule), connection.begin_nested():
            insert(connection, table, row)


@pytest.mark.parametrize("table", ["registry_event", "gateway_event"])
def test_events_are_never_changed_and_stay_for_thirty_days(connection: sa.Connection, table: str) -> None:
    insert(connection, table, event(9, at=str(datetime.now(UTC).replace(tzinfo=None))))
    connection.commit()
    assert "never change" in _refuses(connection, f"UPDATE {table} SET actor = 'eve'")
    assert "30 days" in _refuses(connection, f"DELETE FROM {table}")
    _run(connection, f"DELETE FROM {table} WHERE public_id <> 'evt_9'")
    if connection.dialect.name == "postgresql":
        assert "never change" in _refuses(connection, f"TRUNCATE {table}")


def test_a_version_never_changes_its_content(connection: sa.Connection) -> None:
    for change in (f"digest = '{DIGESTS[0]}'", "number = 5", "files = '[1]'", "size_bytes = 1", "rank = 9"):
        assert "content" in _refuses(connection, f"UPDATE adapter_version SET {change} WHERE number = 2")
    _run(connection, "UPDATE adapter_version SET report = '{}' WHERE number = 2")


def test_a_version_that_an_alias_targets_is_not_retired(connection: sa.Connection) -> None:
    retire = "UPDATE adapter_version SET state = 'retired', retired_at = :at WHERE number = :number"
    assert "targets this version" in _refuses(connection, retire, at=AT, number=1)
    _run(connection, retire, at=AT, number=2)


def test_what_is_purged_stays_so_and_nothing_waits_twice(connection: sa.Connection) -> None:
    _run(connection, "UPDATE adapter_version SET state = 'purged' WHERE number = 3")
    back = "UPDATE adapter_version SET state = 'ready', retired_at = NULL WHERE number = 3"
    assert "No way leads" in _refuses(connection, back)
    again = "UPDATE adapter_version SET state = 'validating', pending = '{}' WHERE number = 2"
    assert "No way leads" in _refuses(connection, again)


def test_an_escalation_keeps_what_was_asked_for_and_its_history(connection: sa.Connection) -> None:
    assert "what was asked for" in _refuses(connection, "UPDATE escalation SET evidence = '[1]'")
    assert "what was asked for" in _refuses(connection, "UPDATE escalation SET requested_by = 'eve'")
    assert "row of an escalation stays" in _refuses(connection, "DELETE FROM escalation")
    assert "history never changes" in _refuses(connection, "UPDATE escalation_history SET actor = 'eve'")
    assert "history never changes" in _refuses(connection, "DELETE FROM escalation_history")
    _run(connection, "UPDATE escalation SET state = 'rejected', revision = 2")
    insert(connection, "escalation", ROW_OF["escalation"] | {"id": f"{99:032x}", "public_id": "esc_2"})


def test_an_escalation_has_one_full_fine_tune_that_keeps_its_pool(connection: sa.Connection) -> None:
    full = {"kind": "full", "pool": "big", "escalation": "esc_1"}
    insert(connection, "adapter_version", version(5, **full))
    connection.commit()
    assert "content" in _refuses(connection, "UPDATE adapter_version SET pool = 'other' WHERE number = 5")
    _run(connection, "UPDATE adapter_version SET replaced = '{}' WHERE number = 5")
    _run(connection, "UPDATE adapter SET next_number = 8")
    second = version(5, **full) | {"id": f"{98:032x}", "number": 7, "digest": DIGESTS[0]}
    with pytest.raises(sa.exc.IntegrityError, match="escalation"), connection.begin_nested():
        insert(connection, "adapter_version", second)


def test_targets_are_versions_whose_weights_sum_to_100(connection: sa.Connection) -> None:
    move = "UPDATE alias SET revision = revision + 1, targets = :targets"
    for chosen in (
        targets(target(1, 99)),
        targets(target(1, 50), target(2, 51)),
        targets(target(1, 50), target(1, 50)),
        targets(target(1, 0), target(2, 100)),
        targets(target(1, 120), target(2, -20)),
        targets(target(5)),
        targets(*[target(number, 10) for number in range(1, 11)]),
        '{"version": 1}',
    ):
        assert "sum to 100" in _refuses(connection, move, targets=chosen)
    _run(connection, move, targets=BOTH)
    _run(connection, move, targets="[]")


def test_revisions_of_an_alias_are_a_line(connection: sa.Connection) -> None:
    next_revision = "next revision"
    assert next_revision in _refuses(connection, "UPDATE alias SET targets = :targets", targets=BOTH)
    assert next_revision in _refuses(connection, "UPDATE alias SET revision = 3, targets = :targets", targets=BOTH)
    assert next_revision in _refuses(connection, "UPDATE alias SET revision = 0")
    _run(connection, "UPDATE alias SET revision = 2, targets = :targets", targets=BOTH)
    with pytest.raises(sa.exc.IntegrityError, match="A history is a line"):
        insert(connection, "alias_history", history(2, targets(target(2))))
    connection.rollback()
    insert(connection, "alias_history", history(2, BOTH))
    connection.commit()
    for change in ("UPDATE alias_history SET actor = 'eve'", "DELETE FROM alias_history"):
        assert "never changes" in _refuses(connection, change)
    _run(connection, "UPDATE alias SET revision = 3, targets = '[]'")
    with pytest.raises(sa.exc.IntegrityError, match="ck_alias_history_action"):
        insert(connection, "alias_history", history(3, "[]", action="moved"))


def test_a_gap_in_a_history_is_refused(connection: sa.Connection) -> None:
    for revision, chosen in ((2, BOTH), (3, "[]")):
        _run(connection, f"UPDATE alias SET revision = {revision}, targets = :targets", targets=chosen)
    with pytest.raises(sa.exc.IntegrityError, match="A history is a line"):
        insert(connection, "alias_history", history(3, "[]"))


def test_what_only_grows_or_stays(connection: sa.Connection) -> None:
    for statement, rule in (
        ("UPDATE registry_epoch SET epoch = epoch", "Epochs grow"),
        ("UPDATE gateway_epoch SET epoch = epoch - 1", "Epochs grow"),
        ("DELETE FROM registry_epoch", "Epochs grow"),
        ("UPDATE adapter SET next_number = 2", "never come back"),
        (f"UPDATE adapter SET tenant_id = '{ADAPTER_ID}'", "keeps its tenant"),
        ("DELETE FROM adapter_version", "stays"),
        ("DELETE FROM alias", "stays"),
        (f"UPDATE alias SET name = 'beta' WHERE id = '{ALIAS_ID}'", "keeps its adapter and name"),
        ("UPDATE usage SET prompt_tokens = 0", "Usage never changes"),
    ):
        assert rule in _refuses(connection, statement)
