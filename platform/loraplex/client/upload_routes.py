"""The routes of uploads in parts, one method each."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import httpx

from loraplex.client.connection import Connection, decode
from loraplex.client.part_plan import FilePlan
from loraplex.client.upload import Upload
from loraplex_registry.wire.adapter import VersionView
from loraplex_registry.wire.upload import UploadView

API_PREFIX = "/api/v1/tenants/"
"""How the path of a part begins that goes through the gateway; all others are the object store's own."""


class UploadRoutes:
    """The uploads of one adapter."""

    def __init__(self, connection: Connection, tenant: str, adapter: str) -> None:
        self.connection = connection
        self._path = f"/api/v1/tenants/{quote(tenant, safe='')}/adapters/{quote(adapter, safe='')}/uploads"

    def start(self, plans: Sequence[FilePlan], options: dict[str, str], idempotency_key: str) -> UploadView:
        """Announce files; `options` are `promote` and `base` as the route takes them."""
        body = {"files": [plan.announce() for plan in plans]}
        headers = {"idempotency-key": idempotency_key}
        answer = self.connection.send("POST", self._path, json=body, params=options, headers=headers)
        return decode(answer.content, UploadView)

    def get(self, upload: str) -> UploadView:
        """Return which parts have arrived, and addresses for the others that are good again."""
        return self.connection.get(self._one(upload), UploadView)

    def complete(self, upload: str, wait: int | None) -> Upload:
        """Have the files judged and made a version; again it gives the same answer.

        Raises:
            ClientError: It was refused; `report` then says why.
        """
        answer = self.connection.send("POST", f"{self._one(upload)}/complete", params={"wait": wait})
        return Upload(decode(answer.content, VersionView), is_new=answer.status_code != httpx.codes.OK)

    def give_up(self, upload: str) -> None:
        """Drop an upload with its parts."""
        self.connection.send("DELETE", self._one(upload))

    def _one(self, upload: str) -> str:
        return f"{self._path}/{quote(upload, safe='')}"
