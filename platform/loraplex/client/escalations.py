"""Escalations through the management API, one method per route; raises `ClientError` where it refuses."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from loraplex.client.connection import Connection, decode
from loraplex.client.errors import ClientError

_ALL = "/api/v1/escalations"


class Escalation(msgspec.Struct, frozen=True, kw_only=True):
    """An escalation in a list; `verbs` are what may be done with it."""

    id: str
    tenant: str
    adapter: str
    version: int
    base_model: str = ""
    state: str = ""
    is_overdue: bool = False
    owner: str | None = None
    requested_by: str = ""
    created_at: str = ""
    age_days: int = 0
    expires_at: str = ""
    review_at: str | None = None
    cost_per_month: float | None = None
    currency: str | None = None
    verbs: list[str] = []


class Escalations:
    """Everything that the command line does with escalations."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def open(self, tenant: str, body: dict[str, Any], idempotency_key: str | None = None) -> dict[str, Any]:
        """Open one."""
        headers = {} if idempotency_key is None else {"idempotency-key": idempotency_key}
        path = f"/api/v1/tenants/{quote(tenant, safe='')}/escalations"
        answer = self.connection.send("POST", path, json=body, headers=headers)
        return decode(answer.content, dict[str, Any])

    def list(self, *, state: str | None = None, tenant: str | None = None) -> list[Escalation]:
        """Return those that this key sees, newest first."""
        return self.connection.list(_ALL, Escalation, state=state, tenant=tenant)

    def get(self, escalation: str) -> dict[str, Any]:
        """Return one with everything that is known of it."""
        return self.connection.get(_path(escalation), dict[str, Any])

    def report(self) -> dict[str, Any]:
        """Return all of them, what they cost, and what forty would."""
        return self.connection.get(f"{_ALL}/report", dict[str, Any])

    def move(self, escalation: str, verb: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Give one a verb; fields that are None are left out."""
        present = {name: value for name, value in body.items() if value is not None}
        options = {} if timeout_s is None else {"timeout": timeout_s}
        answer = self.connection.send("POST", f"{_path(escalation)}/{verb}", json=present, **options)
        return decode(answer.content, dict[str, Any])

    def check_possible(self, escalation: str, verb: str) -> None:
        """Return if one can be given a verb now.

        Raises:
            ClientError: Its state does not allow it.
        """
        found = self.get(escalation)
        if verb not in found["verbs"]:
            possible = f"what can be done now: {', '.join(found['verbs'])}" if found["verbs"] else "nothing can be done"
            raise ClientError(f"This escalation is {found['state']}; {possible}.", code="conflict", param="state")

    def find_digest(self, pool: str) -> str:
        """Return the digest of the one model that a pool's engines serve now.

        Raises:
            ClientError: No pool of that name is for a full model, no engine says what it serves, or they serve several.
        """
        fleet = self.connection.get("/api/v1/fleet", dict[str, Any])
        full = [engine for engine in fleet["data"] if engine.get("model")]
        names = sorted({engine["pool"] for engine in full})
        if pool not in names:
            known = f"there are {', '.join(names)}" if names else "there is none yet"
            raise ClientError(
                f"LORAPLEX_POOLS has no pool {pool} of a full model; {known}.", code="not_found", param="pool"
            )
        models = [engine["state"].get("model") or {} for engine in full if engine["pool"] == pool]
        digests = sorted({model["digest"] for model in models if model.get("digest")})
        if len(digests) != 1:
            found = f"serves {' and '.join(digests)}" if digests else "has no engine that tells what it serves"
            raise ClientError(f"The pool {pool} {found}; say which with --digest.", code="no_replica", param="digest")
        return str(digests[0])


def _path(escalation: str) -> str:
    return f"{_ALL}/{quote(escalation, safe='')}"
