from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from loraplex.client.adapter_name import AdapterRef, parse_ref
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError, ConnectionFailedError, NoKeyError
from loraplex.client.inference import Answer, stream_chat
from loraplex.client.location import Location, find_location
from loraplex.client.management import Management
from loraplex.client.upload import CountingFile, list_files

Handler = Callable[[httpx.Request], httpx.Response]
REPORT = {"verdict": "fail", "checks": [{"name": "shape", "verdict": "fail", "message": "wrong", "subject": "q"}]}


def connect(handler: Handler) -> Connection:
    return Connection(Location("http://gateway", "lpx_key"), httpx.MockTransport(handler))


def test_refusal_becomes_one_error_with_the_servers_words() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer lpx_key"
        error = {"message": "no such tenant", "type": "invalid_request_error", "param": "tenant", "code": "not_found"}
        return httpx.Response(404, json={"error": error})

    with connect(refuse) as connection, pytest.raises(ClientError) as caught:
        connection.send("GET", "/api/v1/tenants/x")
    found = caught.value
    assert (found.status, found.code, found.param, found.message) == (404, "not_found", "tenant", "no such tenant")


def test_refused_upload_carries_its_report(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")

    def refuse(request: httpx.Request) -> httpx.Response:
        body = {"error": {"message": "refused", "code": "adapter_rejected", "param": "q"}, "report": REPORT}
        return httpx.Response(422, json=body)

    with connect(refuse) as connection, pytest.raises(ClientError) as caught:
        Management(connection).push("t", "a", list_files(tmp_path), lambda _: None)
    assert caught.value.report is not None
    assert caught.value.report.checks[0].name == "shape"


def test_answer_of_another_server_is_quoted() -> None:
    with (
        connect(lambda _: httpx.Response(502, text="<html>proxy")) as connection,
        pytest.raises(ClientError, match=r"502.*proxy"),
    ):
        connection.send("GET", "/")


def test_no_server_says_what_to_start() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with connect(fail) as connection, pytest.raises(ConnectionFailedError, match="loraplex up"):
        connection.send("GET", "/")


def test_list_reads_every_page() -> None:
    pages = {"": ["a", "b"], "next": ["c"]}

    def answer(request: httpx.Request) -> httpx.Response:
        cursor = request.url.params.get("cursor", "")
        data = [{"name": name} for name in pages[cursor]]
        return httpx.Response(200, json={"data": data, "next_cursor": None if cursor else "next"})

    with connect(answer) as connection:
        assert [tenant.name for tenant in Management(connection).list_tenants()] == ["a", "b", "c"]


def test_push_streams_each_file_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 100_000)
    (tmp_path / ".hidden").write_text("stays")
    counted: list[int] = []
    seen: dict[str, bytes] = {}

    def take(request: httpx.Request) -> httpx.Response:
        seen["body"] = request.read()
        assert request.url.params["promote"] == "always"
        return httpx.Response(409, json={"error": {"message": "enough", "code": "conflict"}})

    with connect(take) as connection, pytest.raises(ClientError, match="enough"):
        Management(connection).push("t", "a", list_files(tmp_path), counted.append, promote="always", wait=None)
    assert b'name="files"; filename="adapter_config.json"' in seen["body"]
    assert seen["body"].count(b"x") >= 100_000
    assert b"hidden" not in seen["body"]
    assert sum(counted) == 100_002


def test_counting_file_reads_like_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    counted: list[int] = []
    with CountingFile(path, counted.append) as file:
        assert file.read(4) + file.read() == b"0123456789"
    assert sum(counted) == 10


def test_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="save_pretrained"):
        list_files(tmp_path)
    with pytest.raises(ClientError, match="not a folder"):
        list_files(tmp_path / "absent")


def test_promote_sends_the_revision_it_read() -> None:
    sent: dict[str, str] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            sent.update(request.headers)
        alias = {"alias": "live", "targets": [{"version": 2, "weight": 100}], "revision": 8}
        return httpx.Response(200, json=alias, headers={"etag": '"7"'})

    with connect(answer) as connection:
        assert not Management(connection).promote("t", "a", 2).is_new
    assert sent["if-match"] == '"7"'


def test_first_promotion_insists_that_there_is_no_alias() -> None:
    sent: dict[str, str] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(404, json={"error": {"message": "none", "code": "not_found"}})
        sent.update(request.headers)
        return httpx.Response(201, json={"alias": "live", "targets": [], "revision": 1})

    with connect(answer) as connection:
        assert Management(connection).promote("t", "a", 1).is_new
    assert sent["if-none-match"] == "*"


def sse(*events: str) -> httpx.Response:
    text = "".join(f"data: {event}\n\n" for event in events)
    headers = {
        "content-type": "text/event-stream",
        "x-loraplex-model": "t/a@1",
        "x-loraplex-digest": "sha256:" + "a" * 64,
    }
    return httpx.Response(200, text=text, headers=headers)


def test_stream_yields_text_and_fills_the_answer() -> None:
    events = (
        '{"choices":[{"delta":{"role":"assistant"}}]}',
        '{"choices":[{"delta":{"content":"Arrr"}}]}',
        '{"choices":[{"delta":{"content":"!"},"finish_reason":"stop"}]}',
        '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
        "[DONE]",
    )
    answer = Answer()
    with connect(lambda _: sse(*events)) as connection:
        assert list(stream_chat(connection, "t", [], answer)) == ["Arrr", "!"]
    assert (answer.text, answer.model, answer.finish_reason) == ("Arrr!", "t/a@1", "stop")
    assert answer.short_digest == "sha256:" + "a" * 12
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 2)


def test_error_in_the_stream_is_an_error() -> None:
    events = ('{"choices":[{"delta":{"content":"A"}}]}', '{"error":{"message":"engine died","code":"replica_failed"}}')
    with connect(lambda _: sse(*events)) as connection, pytest.raises(ClientError) as caught:
        list(stream_chat(connection, "t", [], Answer()))
    assert caught.value.code == "replica_failed"


@pytest.mark.parametrize("event", ["{", "<html>", '{"x":' + "[" * 100_000], ids=["cut", "page", "nested"])
def test_nonsense_in_the_stream_is_an_error(event: str) -> None:
    with connect(lambda _: sse(event)) as connection, pytest.raises(ClientError) as caught:
        list(stream_chat(connection, "t", [], Answer()))
    assert caught.value.code == "unexpected_answer"


def test_stream_that_was_cut_is_an_error() -> None:
    with (
        connect(lambda _: sse('{"choices":[{"delta":{"content":"A"}}]}')) as connection,
        pytest.raises(ClientError, match="ended early"),
    ):
        list(stream_chat(connection, "t", [], Answer()))


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("team-x", AdapterRef("team-x", None, None)),
        ("team-x/support", AdapterRef("team-x", "support", None)),
        ("team-x/support@3", AdapterRef("team-x", "support", "3")),
        ("team-x@canary", AdapterRef("team-x", None, "canary")),
    ],
)
def test_names_are_read(text: str, ref: AdapterRef) -> None:
    assert parse_ref(text) == ref


@pytest.mark.parametrize("text", ["", "Team-X", "team/", "/a", "team/a/b", "team@", "te am", "-x"])
def test_bad_names_are_refused(text: str) -> None:
    with pytest.raises(ClientError, match="TENANT"):
        parse_ref(text)


def test_version_number_is_asked_for() -> None:
    with pytest.raises(ClientError, match="team-x/default@3"):
        parse_ref("team-x@canary").require_number()


def test_environment_wins_over_the_local_platform(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("http://127.0.0.1:9\n")
    (tmp_path / "admin.key").write_text("local\n")
    base = {"LORAPLEX_DATA_DIR": str(tmp_path)}
    assert find_location(base) == Location("http://127.0.0.1:9", "local", is_direct=True)
    told = base | {"LORAPLEX_URL": "http://other/", "LORAPLEX_API_KEY": "mine"}
    assert find_location(told) == Location("http://other", "mine")


def test_local_admin_key_never_goes_to_another_url(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("http://127.0.0.1:9\n")
    (tmp_path / "admin.key").write_text("local\n")
    location = find_location({"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_URL": "http://other"})
    assert location.key is None
    with pytest.raises(NoKeyError, match="LORAPLEX_API_KEY"):
        location.require_key()


def test_key_is_not_in_the_repr() -> None:
    assert "secret" not in repr(Location("http://x", "secret"))
