"""The front's table of what is open in the core."""

from __future__ import annotations

import pytest

from loraplex_engine.errors import ConflictError
from loraplex_engine.server.core_client import CoreClient
from loraplex_engine.wire.messages import AddRequest, CoreReady, SamplingParams, ToCore, TokenEvent, TokenEvents

READY = CoreReady("m", "f", "sha256:0", 64, 128, [0], 1, 4, "float32", "cpu", True, 1, 8, 16, 4)


def test_id_that_the_core_has_not_let_go_of_is_not_given_to_another_request() -> None:
    """A front gives up on a core that does not answer; the answer may still come, and is not the next request's."""
    client, sent, told = CoreClient(), list[ToCore](), list[tuple[str, str | None]]()
    client.attach(sent.append)
    client.receive(READY)
    request = AddRequest("r-0", [1], SamplingParams(max_tokens=3))
    client.add(request, lambda event: told.append(("first", event.finish)))
    client.abort("r-0", "abort")
    with pytest.raises(ConflictError):
        client.add(request, lambda event: told.append(("second", event.finish)))
    client.receive(TokenEvents([TokenEvent("r-0", [], "abort")]))
    client.add(request, lambda event: told.append(("third", event.finish)))
    client.receive(TokenEvents([TokenEvent("r-0", [5], "length")]))
    assert told == [("first", "abort"), ("third", "length")]
    assert sent.count(request) == 2
