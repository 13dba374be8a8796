"""What people ask and are answered is nowhere but in the answers, and keys are nowhere but with their holders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.client.upload import list_files
from loraplex_engine.bases.pull import pull
from platforms import LivePlatform, running_platform, wait_for
from support import write_adapter

WORD = "Quetzalcoatlus"
"""In everything that a client may say, whole or in pieces as tokens."""

NOTE = "Xochiquetzal"
"""In what usage keeps by the client's wish: names and tags."""

THEIR_ID = "an-id-of-theirs"
"""By which they may look for their request in the log."""

_TOOL = {"type": "function", "function": {"name": f"f_{WORD}", "description": WORD, "parameters": {"type": "object"}}}
_SCHEMA = {"type": "object", "properties": {WORD: {"type": "string", "enum": [WORD]}}, "required": [WORD]}
_NOTES = {"user": NOTE, "metadata": {NOTE: NOTE}, "safety_identifier": NOTE}
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": WORD}], "max_tokens": 2}


def _chat(**fields: Any) -> dict[str, Any]:
    return {**_CHAT, **fields}


CHATS: list[dict[str, Any]] = [
    _chat(stream=True, **_NOTES),
    _chat(stop=[WORD], logprobs=True, top_logprobs=2, n=2),
    _chat(tools=[_TOOL], tool_choice="required", max_tokens=20),
    _chat(response_format={"type": "json_schema", "json_schema": {"name": WORD, "schema": _SCHEMA}}, max_tokens=40),
    _chat(cache_salt=WORD, prompt_logprobs=1),
    # refused, by each part
    _chat(temperature=WORD),
    _chat(max_tokens=10**6),
    _chat(**{WORD: WORD}),
    _chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": WORD}}}),
    _chat(tools=[{**_TOOL, WORD: WORD}]),
    _chat(messages=[{"role": WORD, "content": WORD}]),
    _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{WORD}"}}]}]),
    _chat(messages=[{"role": "user", "content": WORD * 5000}]),
    _chat(logit_bias={WORD: 1}),
]
BODIES = [
    f'{{"model": "tiny", "messages": [{{"role": "user", "content": "{WORD}'.encode(),
    f'{{"model": "{WORD}", "messages": []}}'.encode(),
    f'["{WORD}"]'.encode(),
    f'{{"{WORD}": "{WORD}", "{WORD}": 1}}'.encode(),
    WORD.encode("utf-16"),
]


@pytest.fixture(scope="module")
def platform(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlatform]:
    """A platform that logs all it can, with a tenant's adapter."""
    tmp_path = tmp_path_factory.mktemp("privacy")
    flags = ("--base", str(pull(str(tiny_llama), tmp_path / "cache")), "--dtype", "float32")
    env = {"LORAPLEX_LOG_LEVEL": "debug", "LORAPLEX_TEST_HOOKS": "1"}
    with running_platform(tmp_path / "data", *flags, env=env) as running:
        with running.management() as client:
            client.create_tenant("team-x")
            folder = write_adapter(tmp_path / "adapter", tiny_llama, rank=4)
            client.push("team-x", "bot", list_files(folder), lambda _: None)
        yield running


def test_what_people_say_is_kept_nowhere(platform: LivePlatform) -> None:
    data = platform.data_dir
    with platform.management() as client:
        key = client.create_key("team-x", "app", scopes=["infer"]).key
        (base,) = client.list_bases()
    headers = {"authorization": f"Bearer {key}", "x-request-id": THEIR_ID, "x-loraplex-canary-key": WORD}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60, trust_env=False) as http:
        statuses = [_send(http, {"model": model, **body}) for body in CHATS for model in ("team-x", base.name)]
        statuses += [_send(http, body) for body in BODIES]
        statuses += [_send(http, {"model": "team-x", "prompt": WORD, "echo": True}, "completions")]
        statuses += [_send(http, {"model": f"team-x/{WORD}", "prompt": WORD}, "completions")]
        statuses += [_send(http, {"model": "team-x", "prompt": WORD}, "tokenize")]
        assert _send(http, _chat(model="team-x", **_NOTES)) == 200
        _fail_in_the_middle(platform, http)
        _leave_in_the_middle(platform, http)
    assert {200, 400, 404} <= set(statuses)
    assert not {status for status in statuses if status >= 500}
    platform.wait_idle()
    word, note = re.compile(WORD, re.IGNORECASE), re.compile(NOTE, re.IGNORECASE)
    logs = [data.with_suffix(".log"), *(data / "logs").iterdir()]
    assert {path.name for path in logs} >= {"data.log", "gateway.log", "engine.log"}
    assert any(re.search("debug", path.read_text(), re.IGNORECASE) for path in logs)
    kept = [path for path in data.rglob("*") if path.is_file()]
    assert any(_holds(path, note) for path in kept), "usage keeps what clients call themselves"
    assert [path for path in (*logs, *kept) if _holds(path, word)] == []
    assert [path for path in logs if _holds(path, note) or _holds(path, re.compile("secret_hmac"))] == []
    assert THEIR_ID in (data / "logs" / "gateway.log").read_text()
    told = [httpx.get(f"{platform.url}/metrics", trust_env=False).text, platform.ask_engine("/metrics").text]
    assert not word.search(" ".join([*told, json.dumps(platform.engine_state())]))


KEY_FILES = {"admin.key", "key.pepper", "signing.pem", "engine.key"}


def test_keys_are_with_their_holders_alone(platform: LivePlatform) -> None:
    data = platform.data_dir
    with platform.management() as client:
        keys = {f"tenant {number}": client.create_key("team-x", f"app-{number}").key for number in range(2)}
    keys |= {name: (data / name).read_text().strip() for name in KEY_FILES if (data / name).exists()}
    assert {"admin.key", "key.pepper", "signing.pem"} <= keys.keys()
    secrets = {name: _find_secret(text) for name, text in keys.items()}
    assert min(map(len, secrets.values())) > 20
    told = list(_use_keys(platform, keys["tenant 0"], keys["tenant 1"]))
    logs = [data.with_suffix(".log"), *(data / "logs").iterdir()]
    kept = [path for path in data.rglob("*") if path.is_file() and path.name not in KEY_FILES]
    shown = [
        *told,
        *_list_processes(platform.process.pid),
        *(path.read_bytes().decode("latin-1") for path in logs + kept),
    ]
    for name, secret in secrets.items():
        assert not [text for text in shown if secret in text], name
    for name in KEY_FILES:
        assert not (data / name).exists() or (data / name).stat().st_mode & 0o077 == 0, name


def _find_secret(text: str) -> str:
    """Of a PEM its body, of a key of ours what stands behind its id."""
    return text.splitlines()[1] if text.startswith("-----") else text[15:] if text.startswith("lpx_") else text


def _use_keys(platform: LivePlatform, good: str, other: str) -> Iterator[str]:
    """Everything that is answered to good keys, bad ones and cut ones, and what is told of them afterwards."""
    with httpx.Client(base_url=platform.url, timeout=60, trust_env=False) as http:
        for key in (good, other, good[:-1], good + "x", good.lower(), f"{good} x", platform.admin_key[:-2]):
            for scheme in ("Bearer", "bearer", "Basic", "Token"):
                answer = http.get("/v1/models", headers={"authorization": f"{scheme} {key}"})
                assert answer.status_code in (200, 401)
                yield answer.text
            headers = {"origin": platform.url, "host": platform.url.removeprefix("http://")}
            answer = http.post("/ui/login", data={"key": key}, headers=headers)
            yield answer.text + str(answer.headers)
        for path in (f"/v1/models?key={other}x", f"/v1/models/{good}", f"/api/v1/tenants/{good}"):
            # what is in an address is echoed at most to who sent it; here it must not be kept
            http.get(path, headers={"authorization": f"Bearer {platform.admin_key}"})
        admin = {"authorization": f"Bearer {platform.admin_key}"}
        for path in ("/api/v1/audit?limit=200", "/api/v1/tenants/team-x/keys", "/metrics", "/api/v1/fleet", "/readyz"):
            yield http.get(path, headers=admin).text
    yield platform.ask_engine("/metrics").text
    yield json.dumps(platform.engine_state())


def _list_processes(pid: int) -> Iterator[str]:
    """What `ps` shows of a process and all below it: titles and arguments."""
    for name in ("cmdline", "comm"):
        yield Path(f"/proc/{pid}/{name}").read_bytes().decode("latin-1")
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _list_processes(int(child))


def _send(http: httpx.Client, body: Any, route: str = "chat/completions") -> int:
    path = "/v1/tokenize" if route == "tokenize" else f"/v1/{route}"
    if isinstance(body, bytes):
        return http.post(path, content=body, headers={"content-type": "application/json"}).status_code
    return http.post(path, json=body).status_code


def _fail_in_the_middle(platform: LivePlatform, http: httpx.Client) -> None:
    body = _chat(model="team-x", stream=True, max_tokens=400, n=16, ignore_eos=True)
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        hook = {"id": answer.headers["x-request-id"], "after_tokens": 2}
        platform.ask_engine("/internal/test/kill_request", hook)
        assert "error" in answer.read().decode()


def _leave_in_the_middle(platform: LivePlatform, http: httpx.Client) -> None:
    body = _chat(model="team-x", stream=True, max_tokens=400, n=16, ignore_eos=True)
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_raw())
    wait_for(lambda: platform.engine_state()["open_requests"] == 0)


def _holds(path: Path, pattern: re.Pattern[str]) -> bool:
    return pattern.search(path.read_bytes().decode("latin-1")) is not None
