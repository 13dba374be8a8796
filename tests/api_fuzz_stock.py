"""What fuzzed calls use up: uploads, keys, adapters to delete, escalations; made one by one as calls need them.

`Stock.give` knows, by the name of an operation, what a call of it needs to succeed. It acts with an administrator's
key; escalations are asked for with the team's, as nobody approves their own.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import httpx

_MAX_OF_EACH = 10
_PART_BYTES = 8 << 20


@dataclass(frozen=True)
class Given:
    """What a call shall use: path parameters, headers, fields of its body, and how it is sent."""

    path: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    sent: dict[str, Any] = field(default_factory=dict)


class Stock:
    """Makes things for calls, at most `_MAX_OF_EACH` for each operation; then there is nothing more."""

    def __init__(
        self, url: str, admin_key: str, team_key: str, tenant: str, model: str, prefix: str, folders: list[str]
    ) -> None:
        self._admin = _connect(url, admin_key)
        self._team = _connect(url, team_key)
        self._tenant = tenant
        self._files, self._other = (
            {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())} for folder in folders
        )
        self._prefix = prefix
        self._serial = count()
        self._num_given: Counter[str] = Counter()
        self._makers: dict[str, Callable[[], Given]] = {
            "chat": lambda: _send({"model": model, "messages": [{"role": "user", "content": "h"}], "max_tokens": 1}),
            "complete": lambda: _send({"model": model, "prompt": "h", "max_tokens": 1}),
            "tokenize": lambda: _send({"model": model, "prompt": "h"}),
            "uploadVersion": lambda: Given({"adapter": self._name()}, sent={"files": self._parts()}),
            "beginUpload": lambda: Given({"adapter": self._name()}, body={"files": self._announce()}),
            "showUpload": self._begin,
            "abortUpload": self._begin,
            "putPart": self._part,
            "completeUpload": self._sent,
            "deleteAdapter": self._adapter,
            "changeAdapter": self._adapter,
            "openEscalation": lambda: Given(body={"adapter": self._adapter().path["adapter"]}),
            "changeTenant": self._other_tenant,
            "deleteTenant": self._other_tenant,
            "changeKey": self._key,
            "rotateKey": self._key,
            "revokeKey": self._key,
            "moveAlias": self._alias,
            "deleteAlias": self._alias,
            "rollBackAlias": self._alias,
            "retireVersion": lambda: self._version("release"),
            "quarantineVersion": lambda: self._version("release"),
            "releaseVersion": lambda: self._version("quarantine"),
            "restoreVersion": lambda: self._version("retire"),
            "showEscalation": self._escalation,
            "approveEscalation": self._escalation,
            "rejectEscalation": self._escalation,
            "closeEscalation": self._escalation,
            "extendEscalation": self._approved,
        }

    def give(self, operation: str) -> Given | None:
        """Return what a call of an operation needs; None where names alone do, or enough has been given."""
        if operation not in self._makers or self._num_given[operation] >= _MAX_OF_EACH:
            return None
        self._num_given[operation] += 1
        return self._makers[operation]()

    def _name(self) -> str:
        return f"{self._prefix}-{next(self._serial)}"

    def _parts(self) -> list[tuple[str, tuple[str, bytes]]]:
        return [("files", each) for each in self._files.items()]

    def _upload(self, adapter: str, files: dict[str, bytes]) -> None:
        parts = [("files", each) for each in files.items()]
        self._admin.post(f"{self._of(adapter)}/versions", files=parts).raise_for_status()

    def _of(self, adapter: str) -> str:
        return f"/api/v1/tenants/{self._tenant}/adapters/{adapter}"

    def _adapter(self) -> Given:
        name = self._name()
        self._upload(name, self._files)
        return Given({"tenant": self._tenant, "adapter": name})

    def _other_tenant(self) -> Given:
        name = self._name()
        self._admin.post("/api/v1/tenants", json={"name": name}).raise_for_status()
        return Given({"tenant": name})

    def _key(self) -> Given:
        path = f"/api/v1/tenants/{self._tenant}/keys"
        made = self._admin.post(path, json={"name": self._name(), "scopes": ["infer"]}).raise_for_status().json()
        return Given({"tenant": self._tenant, "key_id": made["id"]})

    def _announce(self) -> list[dict[str, Any]]:
        files = []
        for name, content in self._files.items():
            sha256 = hashlib.sha256(content).hexdigest()
            about = {"name": name, "size": len(content), "sha256": sha256}
            files.append({**about, "part_size": _PART_BYTES, "part_sha256": [sha256]})
        return files

    def _begin(self) -> Given:
        name, body = self._name(), {"files": self._announce()}
        begun = self._admin.post(f"{self._of(name)}/uploads", json=body).raise_for_status().json()
        return Given({"tenant": self._tenant, "adapter": name, "upload": begun["id"]})

    def _part(self) -> Given:
        content = next(iter(self._files.values()))
        checksum = base64.b64encode(hashlib.sha256(content).digest()).decode()
        path = self._begin().path | {"file": 0, "part": 0}
        return Given(path, headers={"x-amz-checksum-sha256": checksum}, sent={"data": content})

    def _sent(self) -> Given:
        begun = self._begin()
        upload = f"{self._of(begun.path['adapter'])}/uploads/{begun.path['upload']}"
        for part in self._admin.get(upload).raise_for_status().json()["parts"]:
            content = self._files[part["file"]]
            self._admin.request(
                part["method"], part["url"], headers=part["headers"], content=content
            ).raise_for_status()
        return begun

    def _alias(self) -> Given:
        """An alias that was moved from one version to another, with its revision."""
        adapter, alias = self._adapter().path["adapter"], self._name()
        self._upload(adapter, self._other)
        where = f"{self._of(adapter)}/aliases/{alias}"
        etag = "*"
        for number, header in enumerate(("If-None-Match", "If-Match"), 1):
            targets = {"targets": [{"version": number, "weight": 100}]}
            etag = self._admin.put(where, json=targets, headers={header: etag}).raise_for_status().headers["etag"]
        return Given({"tenant": self._tenant, "adapter": adapter, "alias": alias}, headers={"If-Match": etag})

    def _version(self, after: str) -> Given:
        """A version that nothing points to, after one more verb; released, it is as it was."""
        given = self._adapter()
        adapter = self._of(given.path["adapter"])
        self._admin.delete(f"{adapter}/aliases/live", headers={"If-Match": "*"}).raise_for_status()
        if after == "retire":
            self._admin.delete(f"{adapter}/versions/1").raise_for_status()
        elif after == "quarantine":
            self._admin.post(f"{adapter}/versions/1/quarantine").raise_for_status()
        return Given(given.path | {"number": 1})

    def _escalation(self) -> Given:
        evidence = {"evaluation": "e", "metric": "m", "data_digest": f"sha256:{0:064x}", "num_samples": 1}
        evidence |= {"base": 1, "lora": 2, "target": 3, "ranks_tried": [{"rank": 8, "value": 2}]}
        body = {"adapter": self._adapter().path["adapter"], "evidence": evidence}
        made = self._team.post(f"/api/v1/tenants/{self._tenant}/escalations", json=body).raise_for_status()
        return Given({"escalation": made.json()["id"]})

    def _approved(self) -> Given:
        given = self._escalation()
        review_at = (datetime.now(UTC) + timedelta(days=30)).isoformat()
        body = {"owner": "o", "justification": "j", "budget_per_month": 1, "review_at": review_at}
        path = f"/api/v1/escalations/{given.path['escalation']}/approve"
        self._admin.post(path, json=body).raise_for_status()
        return given


def _send(body: dict[str, Any]) -> Given:
    return Given(sent={"json": body})


def _connect(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)
