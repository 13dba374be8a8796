"""Names as they are typed never become steps to another address."""

from __future__ import annotations

import httpx
import pytest

from loraplex.client.adapter_name import parse_ref
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.client.location import Location
from loraplex.client.management import Management


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_no_name_leads_a_request_to_another_address(name: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{request.method} {request.url} was sent")

    with Connection(Location("http://gateway", "lpx_key"), httpx.MockTransport(fail)) as connection:
        client = Management(connection)
        for call in (
            lambda: client.delete_alias("team-x", "bot", name),
            lambda: client.revoke_key("team-x", name),
            lambda: client.delete_adapter("team-x", name),
            lambda: client.delete_tenant(name),
        ):
            with pytest.raises(ClientError, match="is no name") as caught:
                call()
            assert caught.value.code == "invalid_name"


@pytest.mark.parametrize("text", ["team@..", "team@.", "team/a@Live", "team/a@b/c"])
def test_what_stands_after_the_at_is_a_version_or_an_alias(text: str) -> None:
    with pytest.raises(ClientError, match="TENANT/ADAPTER@VERSION"):
        parse_ref(text)
