"""Cases of section 4 at an engine's own port: an engine whose blocks never suffice, beside one that has plenty."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from case_world import Cases
from core_world import share_native
from platforms import wait_for
from scripted_core import SIGNER, sign

PROGRAM = """
import json, sys
import msgspec
from loraplex_engine.config import EngineConfig
from loraplex_engine.server import process
config = msgspec.convert(json.loads(sys.argv[1]), EngineConfig)
settings = {"listen": "127.0.0.1:0", "verify_keys": sys.argv[2], "engine_key": "k"}
sys.exit(process.main(config, settings))
"""
NAMES = [None, "F01", "F07", None, "F20", "F02"]
MAX_TOKENS = 60
# keys and values of two layers, two heads of 20, float32
BLOCK_BYTES = 2 * 2 * 16 * 2 * 20 * 4

Answer = dict[str, Any]


class LiveEngine:
    """An engine process with hooks, and the digests of the adapters that it can load."""

    def __init__(self, cases: Cases, folder: Path, **settings: Any) -> None:
        config = {
            "base": str(cases.base),
            "cache_dir": share_native(folder / "cache"),
            "dtype": "float32",
            "cpu_threads": 1,
            "max_loras": 8,
            "has_test_hooks": True,
            **settings,
        }
        command = [sys.executable, "-c", PROGRAM, json.dumps(config), SIGNER.public_pem.decode()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().removeprefix("listening on ").split()[0]
        self.model_of: dict[str | None, str] = {}

    def __enter__(self) -> LiveEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_ready(self, cases: Cases) -> None:
        """Wait for the model, and make the adapters loadable."""
        wait_for(lambda: self.call("GET", "/readyz").status_code == 200, 240)
        self.model_of[None] = self.call("GET", "/readyz").json()["model"]
        for name in NAMES:
            if name is not None:
                self.model_of[name] = self._bind(cases.folders[name])

    def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        # what is internal is asked in the platform's name; a token lives for a minute
        headers = {"authorization": f"Bearer {sign(role='admin')}"}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def _bind(self, folder: Path) -> str:
        digest: str = self.call("POST", "/internal/test/bind", {"path": str(folder)}).json()["digest"]
        return digest

    def count(self, metric: str) -> float:
        lines = self.call("GET", "/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{metric} "))

    def ask(self, index: int, fields: dict[str, Any]) -> Answer:
        """Text, entries, end and cost of the request `index`, whole or streamed."""
        body = {
            "model": self.model_of[NAMES[index]],
            "prompt": [(7 * index + j) % 290 + 3 for j in range(40)],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 3,
            **fields,
        }
        response = self.call("POST", "/v1/completions", body)
        assert response.status_code == 200, response.text
        return _read_stream(response.text) if body.get("stream") else _read_whole(response.json())

    def ask_all(self, fields: dict[str, Any]) -> list[Answer]:
        """The answers of all requests, sent at once."""
        with ThreadPoolExecutor(len(NAMES)) as pool:
            return list(pool.map(lambda index: self.ask(index, fields), range(len(NAMES))))


def _read_whole(body: dict[str, Any]) -> Answer:
    [choice] = body["choices"]
    return {"text": choice["text"], "finish": choice["finish_reason"], "usage": _cost(body), **choice["logprobs"]}


def _read_stream(text: str) -> Answer:
    found: Answer = {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    # comments say that tokens come without text yet
    blocks = [block for block in text.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    for block in blocks:
        event = json.loads(block.removeprefix("data: "))
        if event.get("usage"):
            found["usage"] = _cost(event)
        for choice in event["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                found[name] += values
            found["text"] += choice["text"]
            found["finish"] = choice["finish_reason"]
    return found


def _cost(event: dict[str, Any]) -> tuple[int, int]:
    return event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def engines(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveEngine, LiveEngine]]:
    """One with plenty of blocks, and one that must preempt."""
    with (
        LiveEngine(cases, tmp_path_factory.mktemp("ample"), kv_cache_memory_bytes=600 * BLOCK_BYTES) as ample,
        LiveEngine(cases, tmp_path_factory.mktemp("tight"), kv_cache_memory_bytes=16 * BLOCK_BYTES) as tight,
    ):
        for engine in (ample, tight):
            engine.wait_ready(cases)
        yield ample, tight


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"frequency_penalty": 1, "presence_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"seed": 1, "temperature": 0.9, "top_p": 0.95},
        {"stop": "of each text's last quarter"},
    ],
    ids=["greedy", "frequency", "repetition", "seed", "stop"],
)
def test_b077_preempted_streams_are_those_of_an_engine_that_never_preempts(
    engines: tuple[LiveEngine, LiveEngine], fields: dict[str, Any]
) -> None:
    ample, tight = engines
    if "stop" in fields:
        texts = [answer["text"] for answer in ample.ask_all({})]
        # late, and not what stands for bytes that are no text, so that most of them still meet
        found = [re.search(r"[^\ufffd]{2}", text[3 * len(text) // 4 :]) for text in texts]
        fields = {"stop": sorted({match.group() for match in found if match})}
    expected = ample.ask_all(fields)
    before = tight.count("loraplex_preemptions_total")
    # whether they meet, and must preempt, is for the clients' clocks to say
    for _ in range(5):
        assert tight.ask_all(fields) == expected
        assert tight.ask_all(fields | {"stream": True, "stream_options": {"include_usage": True}}) == expected
        if tight.count("loraplex_preemptions_total") > before:
            break
    assert tight.count("loraplex_preemptions_total") > before
    assert ample.count("loraplex_preemptions_total") == 0
    for answer in expected:
        num_entries = len(answer["tokens"])
        if answer["finish"] == "length":
            assert num_entries == answer["usage"][1] == MAX_TOKENS
        else:
            assert num_entries <= answer["usage"][1] < MAX_TOKENS
        assert all(len(answer[name]) == num_entries for name in ("token_logprobs", "top_logprobs", "text_offset"))
    assert any(answer["finish"] == "stop" for answer in expected) == ("stop" in fields)
