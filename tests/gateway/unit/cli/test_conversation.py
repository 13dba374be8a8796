"""Commands against a gateway that a test scripts: what is asked of it, what is said about its answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.cli.app import main
from loraplex.cli.session import open_management
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.demo.team import create_team

Handler = Callable[[httpx.Request], httpx.Response]
Start = Callable[[Handler], list[str]]
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Put a scripted gateway behind all commands; returns the calls that it gets."""
    monkeypatch.setenv("LORAPLEX_URL", "http://gateway")
    monkeypatch.setenv("LORAPLEX_API_KEY", "lpx_key")

    def start(handler: Handler) -> list[str]:
        calls: list[str] = []

        def answer(request: httpx.Request) -> httpx.Response:
            request.read()
            calls.append(f"{request.method} {request.url.raw_path.decode()}")
            return handler(request)

        for module in ("session", "status", "chat"):
            connect = partial(Connection, transport=httpx.MockTransport(answer))
            monkeypatch.setattr(f"loraplex.cli.{module}.Connection", connect)
        return calls

    return start


def at_terminal(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Let somebody sit at the terminal and type these lines; an exception is a key like Ctrl-C."""
    typed = iter(lines)

    def read(*_: object) -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)


def version(**changes: Any) -> dict[str, Any]:
    facts = {
        "tenant": "team-x",
        "adapter": "default",
        "version": 1,
        "kind": "lora",
        "digest": "sha256:" + "a" * 64,
        "state": "ready",
        "promoted": True,
        "base_model": "b",
        "rank": 8,
        "target_modules": ["q_proj"],
        "num_parameters": 1,
        "size_bytes": 1,
        "created_at": "",
        "created_by": "",
        "report": {
            "verdict": "warn",
            "checks": [
                {"name": "parity", "verdict": "warn", "message": "Nothing to do: not compared yet; the rest passed."},
                {"name": "target_modules", "verdict": "warn", "message": "The base has no 'wte'; PEFT ignores it."},
            ],
        },
    }
    return facts | changes


def write_training_output(folder: Path, *more: str) -> Path:
    for name in (*FILES, "README.md", "tokenizer.json", "optimizer.pt", "training_args.bin", *more):
        (folder / name).write_bytes(b"{}")
    return folder


def refuse(_: httpx.Request) -> httpx.Response:
    return httpx.Response(500, json={"error": {"message": "must not be called", "code": "internal"}})


def test_bare_tenant_deletes_no_adapter(gateway: Start, capsys: pytest.CaptureFixture[str]) -> None:
    calls = gateway(refuse)
    assert main(["adapters", "delete", "team-x", "--yes"]) == 1
    assert "team-x/default" in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize("words", [["adapters", "delete", "team-x/a"], ["tenants", "delete", "team-x", "--cascade"]])
def test_deletion_asks_at_a_terminal(
    words: list[str], gateway: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = gateway(lambda _: httpx.Response(204))
    for answer in ("n", "", EOFError):
        at_terminal(monkeypatch, answer)  # type: ignore[arg-type]
        assert main(words) == 1
    assert calls == []
    assert "Nothing was deleted" in capsys.readouterr().err
    at_terminal(monkeypatch, "y")
    assert main(words) == 0
    at_terminal(monkeypatch)
    assert main([*words, "--yes"]) == 0
    assert len(calls) == 2


def test_refused_deletion_of_a_tenant_names_the_flag(gateway: Start, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"message": "team-x has 2 adapters; delete them first, or add ?cascade=true", "code": "conflict"}
    gateway(lambda _: httpx.Response(409, json={"error": error}))
    assert main(["tenants", "delete", "team-x"]) == 1
    assert "or add --cascade" in capsys.readouterr().err


def test_training_output_is_pushed_without_what_no_adapter_needs(
    gateway: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[bytes] = []

    def take(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            sent.append(request.content)
            return httpx.Response(201, json=version())
        adapter = {"tenant": "team-x", "name": "default", "is_default": True}
        return httpx.Response(200, json=adapter if request.url.path.endswith("/default") else {"data": [adapter]})

    gateway(take)
    assert main(["adapters", "push", str(write_training_output(tmp_path)), "--as", "team-x"]) == 0
    for name in (*FILES, "README.md", "tokenizer.json"):
        assert f'filename="{name}"'.encode() in sent[0]
    assert b"optimizer" not in sent[0]
    shown = capsys.readouterr().err
    assert "left out: optimizer.pt, training_args.bin\n" in shown
    assert shown.startswith("left out:"), "no empty line"
    assert "\n\n" not in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "note parity - Nothing to do: not compared yet; the rest passed." in lines
    assert "warn target_modules - The base has no 'wte'; PEFT ignores it." in lines
    assert "default is now the default adapter of team-x" in shown


def test_equal_content_is_said_to_be_unchanged(
    gateway: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = gateway(lambda _: httpx.Response(200, json=version(version=3, adapter="a")))
    assert main(["adapters", "push", str(write_training_output(tmp_path)), "--as", "team-x/a"]) == 0
    assert "unchanged: same content as team-x/a@3" in capsys.readouterr().err
    assert len(calls) == 1


def test_json_error_is_the_last_line_of_standard_error(gateway: Start, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"message": "no such tenant", "code": "not_found", "param": "tenant"}
    gateway(lambda _: httpx.Response(404, json={"error": error}))
    assert main(["tenants", "show", "x", "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert json.loads(shown.err.splitlines()[-1]) == {"error": error}
    assert main(["tenants", "show", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "wrong_call"


def test_download_writes_over_nothing_unless_told(
    gateway: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if "/files/" in request.url.path:
            return httpx.Response(200 if request.url.path.endswith(FILES) else 404, content=b"new")
        return httpx.Response(200, json=version())

    gateway(answer)
    mine = tmp_path / FILES[0]
    mine.write_text("mine")
    words = ["adapters", "pull", "team-x/default@1", "--to", str(tmp_path)]
    assert main(words) == 1
    assert mine.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    capsys.readouterr()
    assert main([*words, "--force"]) == 0
    assert capsys.readouterr().err.startswith("✓ "), "no empty line"
    assert mine.read_text() == "new"


def test_full_fine_tune_is_not_downloaded_and_leaves_no_folder(
    gateway: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway(lambda _: httpx.Response(200, json=version(version=5, kind="full", pool="team-x-full")))
    assert main(["adapters", "pull", "team-x/default@5", "--to", str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()
    shown = " ".join(capsys.readouterr().err.split())
    assert "team-x/default@5 is a full fine-tune" in shown
    assert "whoever runs its pool team-x-full has them" in shown


def test_usage_counts_failed_and_lost_requests_as_errors(gateway: Start, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"tenant": "t", "requests": 9, "requests_cancelled": 4, "requests_error": 2, "requests_lost": 1}
    gateway(lambda _: httpx.Response(200, json={"data": [row]}))
    assert main(["usage"]) == 0
    _, columns, cells = capsys.readouterr().out.splitlines()
    assert columns.split() == ["tenant", "requests", "errors"]
    assert cells.split() == ["t", "9", "3"]


def show_fleet(*serves: bool) -> Handler:
    model = {"dtype": "bfloat16", "max_model_len": 512, "max_loras": 8, "max_lora_rank": 64, "num_blocks": 10}
    model |= {"block_size": 16, "ops": "native", "row_invariant": True}
    engines = [
        {"replica": "r", "url": "http://e", "base": "b", "serves": yes, "state": {"model": model if yes else None}}
        for yes in serves
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": engines if request.url.path.endswith("/fleet") else []})

    return answer


def test_status_is_ready_when_an_engine_serves(gateway: Start, capsys: pytest.CaptureFixture[str]) -> None:
    gateway(show_fleet(False))
    assert main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["is_ready"] is False
    gateway(show_fleet(False, True))
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert (
        "bfloat16, context 512, 8 adapter slots up to rank 64, KV for 160 tokens, native ops, "
        "answers do not depend on what shares the batch"
    ) in shown


def test_status_shows_the_engines_to_a_key_that_may_call_nothing(
    gateway: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            error = {
                "message": "This key lacks the scope infer",
                "type": "t",
                "param": None,
                "code": "permission_denied",
            }
            return httpx.Response(403, json={"error": error})
        return show_fleet(True)(request)

    gateway(answer)
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["is_ready"], len(found["engines"]), found["models"]) == (True, 1, [])


def stream(*pieces: str, then: type[BaseException] | None = None, reason: str = "stop") -> httpx.Response:
    def produce() -> Iterator[bytes]:
        for piece in pieces:
            yield f'data: {{"choices":[{{"delta":{{"content":"{piece}"}}}}]}}\n\n'.encode()
        if then:
            raise then
        yield f'data: {{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}\n\n'.encode()
        yield f'data: {{"choices":[],"usage":{{"completion_tokens":{len(pieces)}}}}}\n\n'.encode()
        yield b"data: [DONE]\n\n"

    return httpx.Response(200, content=produce())


def test_ctrl_c_ends_the_answer_and_then_the_conversation(gateway: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append([message["content"] for message in json.loads(request.content)["messages"]])
        return stream("half", then=KeyboardInterrupt) if len(asked) == 1 else stream("whole")

    gateway(answer)
    at_terminal(monkeypatch, "one", "two", KeyboardInterrupt)
    assert main(["chat", "--model", "t"]) == 130
    assert asked == [["one"], ["one", "half", "two"]]


def test_empty_message_is_an_error(gateway: Start, capsys: pytest.CaptureFixture[str]) -> None:
    calls = gateway(refuse)
    assert main(["chat", "--model", "t", " "]) == 1
    assert "The message is empty" in capsys.readouterr().err
    assert calls == []


def test_slash_commands_never_go_to_the_model(
    gateway: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append([message["content"] for message in json.loads(request.content)["messages"]])
        return stream("yes")

    gateway(answer)
    at_terminal(monkeypatch, "/help", "/Reset", "/exit now", "one", "/reset", " /etc/fstab ", "/quit", "late")
    assert main(["chat", "--model", "t"]) == 0
    assert asked == [["one"], ["/etc/fstab"]]
    shown = capsys.readouterr().err
    for word in ("/help", "/Reset", "/exit"):
        assert f"There is no command {word}: /reset forgets, /exit or /quit leaves" in shown


def test_what_comes_from_a_pipe_is_one_message_as_it_stands(
    gateway: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.extend(message["content"] for message in json.loads(request.content)["messages"])
        return stream("yes")

    gateway(answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/exit\ntwo\n"))
    assert main(["chat", "--model", "t"]) == 0
    assert asked == ["one\n/exit\ntwo"]
    assert main(["chat", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "all that comes from a pipe as one message" in shown


def test_answer_that_was_cut_off_is_marked(gateway: Start, capsys: pytest.CaptureFixture[str]) -> None:
    gateway(lambda _: stream("a", "b", reason="length"))
    assert main(["chat", "--model", "t", "Hello", "--max-tokens", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "ab\n"
    assert "[cut off at 2 tokens]\n" in shown.err
    gateway(lambda _: stream("a", "b"))
    assert main(["chat", "--model", "t", "Hello", "--max-tokens", "2"]) == 0
    assert "cut off" not in capsys.readouterr().err


@pytest.mark.parametrize(("name", "word"), [("parity", "pass, with a note"), ("template", "warn")])
def test_only_a_warning_that_asks_for_something_is_shown_as_one(
    name: str, word: str, gateway: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [{"name": "format", "verdict": "pass", "message": ""}, {"name": name, "verdict": "warn", "message": "m"}]
    gateway(lambda _: httpx.Response(200, json=version(report={"verdict": "warn", "checks": checks})))
    assert main(["adapters", "show", "team-x/default@1"]) == 0
    shown = capsys.readouterr().out
    assert f"1 of 2 checks passed; verdict: {word}\n" in shown
    assert ("note" if name == "parity" else "warn ") in shown
    assert main(["adapters", "show", "team-x/default@1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["verdict"] == "warn"


def test_demo_finds_its_teams_in_a_folder_that_was_kept(gateway: Start) -> None:
    made: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/v1/tenants":
            return httpx.Response(409, json={"error": {"message": "there already", "code": made[-1]}})
        if request.url.path.endswith("/keys"):
            return httpx.Response(201, json={"id": "key_1", "name": "demo", "key": "lpx_new"})
        return httpx.Response(200, json=version(tenant="team-pirate"))

    gateway(answer)
    with open_management() as client:
        made.append("conflict")
        team = create_team(client, "pirate")
        assert (team.name, team.key, team.version.version) == ("team-pirate", "lpx_new", 1)
        made.append("name_reserved")
        with pytest.raises(ClientError, match="there already"):
            create_team(client, "pirate")
