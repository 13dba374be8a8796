"""Asks engines how a request ended that an earlier gateway left open."""

from __future__ import annotations

import msgspec

from loraplex.fleet.fleet import Fleet
from loraplex.usage.record import Done, RequestRow
from loraplex_engine.wire.client import EngineClient, ReplicaFailedError, UnreachableError
from loraplex_engine.wire.done import RequestDone


class DoneFinder:
    """Finds the last word on a request among the engines that are configured now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def find(self, row: RequestRow) -> tuple[Done, str] | None:
        """Return what `row` cost and the engine that says so, ending it if it still runs; None if no engine knows it.

        Of several engines that know it, those tried first had refused it: what counts is the one that sampled tokens.

        Raises:
            OSError: No engine sampled tokens for it, but one did not answer.
        """
        urls = [replica.url for replica in self._fleet.view.replicas]
        found: tuple[Done, str] | None = None
        is_complete = True
        for url in sorted(urls, key=lambda url: url != row.replica):
            try:
                done = await _ask(self._fleet.client(url), row.request_id)
            except (UnreachableError, ReplicaFailedError, msgspec.MsgspecError):
                is_complete = False
                continue
            if done is not None and (found is None or done.completion_tokens):
                fields = msgspec.structs.asdict(done)
                found = Done(**{name: fields[name] for name in Done.__struct_fields__}), url
            if done is not None and done.completion_tokens:
                return found
        if not is_complete:
            raise OSError("an engine does not answer")
        return found


async def _ask(client: EngineClient, request_id: str) -> RequestDone | None:
    status = await client.find_request(request_id)
    if status is None:
        return None
    if status.state == "finished":
        return status.done
    return await client.abort(request_id) or status.done
