"""An engine apart from everything, which no fault reaches: what each adapter says when it is asked alone.

It gets adapters as folders, past registry, store and cache, so it cannot share a mistake with what is tested.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx

from core_world import share_native
from loraplex_registry.wire.identity import Identity, TokenSigner
from server_process import ServerProcess
from support import free_port

PROMPTS = ("The parcel", "Forty teams share", "A low rank")
NUM_TOKENS = 24
BASE_DIGEST = "base"
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
_TESTER = Identity(
    role="admin", tenant_id=None, tenant=None, scopes=(), key_id="test", actor="test", request_id="req_reference"
)


def engine_environ(signer: TokenSigner, cache: Path, **more: str) -> dict[str, str]:
    """The environment of an engine that believes `signer`, with a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    native = {name: os.environ[name] for name in ("LORAPLEX_NATIVE",) if name in os.environ}
    cached = str(cache) if cache.exists() else share_native(cache)
    return {**kept, **native, "LORAPLEX_VERIFY_KEYS": signer.public_pem.decode(), "LORAPLEX_CACHE_DIR": cached, **more}


def engine_argv(base: Path, port: int, *flags: str) -> list[str]:
    """How an engine is started; float32, one thread."""
    argv = [sys.executable, "-m", "loraplex_engine", "serve", "--base", str(base), "--listen", f"127.0.0.1:{port}"]
    return [*argv, "--dtype", "float32", "--cpu-threads", "1", "--kv-cache-memory-bytes", "64MiB", *flags]


class Reference:
    """`texts` are the answers, by digest and prompt; no two contents say the same."""

    def __init__(self, folder: Path, base: Path, signer: TokenSigner) -> None:
        port = free_port()
        environ = engine_environ(signer, folder / "reference-cache", LORAPLEX_TEST_HOOKS="1")
        self.process = ServerProcess(engine_argv(base, port), environ, folder / "reference.log", port, "/readyz")
        self._base, self._signer = base, signer
        self._http = httpx.AsyncClient(base_url=self.process.url, trust_env=False, timeout=60)
        self.texts: dict[str, dict[str, str]] = {}

    async def start(self) -> None:
        """Start it and learn what the bare base says."""
        await asyncio.to_thread(self.process.start)
        async with asyncio.timeout(120):
            while not await self._is_ready():  # noqa: ASYNC110 - it asks
                await asyncio.sleep(0.1)
        self.texts[BASE_DIGEST] = await self._ask_all(self._base.name)

    async def stop(self) -> None:
        """End it."""
        await self._http.aclose()
        self.process.kill()

    async def learn(self, adapter: Path) -> str:
        """Ask an adapter alone and return its digest."""
        digest: str = (await self._post("/internal/test/bind", {"path": str(adapter)}))["digest"]
        texts = await self._ask_all(digest)
        for known, others in self.texts.items():
            assert known == digest or all(texts[prompt] != others[prompt] for prompt in PROMPTS), "not told apart"
        self.texts[digest] = texts
        return digest

    async def _is_ready(self) -> bool:
        return (await self._http.get("/readyz", headers=self._headers())).status_code == httpx.codes.OK

    async def _ask_all(self, model: str) -> dict[str, str]:
        return {prompt: await self._ask(model, prompt) for prompt in PROMPTS}

    async def _ask(self, model: str, prompt: str) -> str:
        body = await self._post("/v1/completions", {"model": model, "prompt": prompt, **GREEDY})
        text: str = body["choices"][0]["text"]
        return text

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self._http.post(path, json=body, headers=self._headers())
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer.json()

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._signer.sign(_TESTER, 'engine')}"}
