"""A running registry app as tests see it: callers with real tokens, uploads, what lies in the store."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from loraplex_registry.app import Registry
from loraplex_registry.peft.spec import BaseSpec, ModuleSpec
from loraplex_registry.uploads.check_process import Verdict, judge
from loraplex_registry.uploads.checker import build_job
from loraplex_registry.wire.identity import AdapterLimits, Identity, TokenSigner
from support import linear_shapes, tiny_llama_config

ENGINE_KEY = "engine-key-of-the-tests"
BASE = "tiny-llama"


def build_tiny_spec(name: str = BASE, **changes: Any) -> BaseSpec:
    """What the registry knows of the tiny Llama of `support`."""
    shapes = linear_shapes(tiny_llama_config())
    fields: dict[str, Any] = {
        "name": name,
        "accepted_names": (),
        "fingerprint": "f" * 64,
        "weights_digest": "w" * 64,
        "vocab_size": 331,
        "modules": {path: ModuleSpec(*shape) for path, shape in shapes.items()},
        "max_lora_rank": 64,
        "default_context": 512,
    }
    return BaseSpec(**fields | changes)


class ThreadChecker:
    """The same checks in a thread, without a process for each upload."""

    async def check(self, files: Mapping[str, Path], base: BaseSpec, *, forced_base: bool, timeout_s: float) -> Verdict:
        return await asyncio.to_thread(judge, build_job(files, base, forced_base=forced_base))

    def close(self) -> None:
        pass


@dataclass
class Caller:
    """Calls the app as one identity."""

    http: httpx.AsyncClient
    headers: dict[str, str]

    async def __call__(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        headers = {**self.headers, **kwargs.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **kwargs)

    async def upload(self, path: str, folder: Path | Mapping[str, bytes], **kwargs: Any) -> httpx.Response:
        """Upload a folder, or files given by name."""
        contents = read_folder(folder) if isinstance(folder, Path) else dict(folder)
        files = [("files", (name, content)) for name, content in contents.items()]
        return await self("POST", f"{path}/versions", files=files, **kwargs)


@dataclass
class World:
    """The running app and ways to call it."""

    http: httpx.AsyncClient
    registry: Registry
    signer: TokenSigner
    store: Path

    def caller(
        self,
        tenant: str | None = "team-a",
        role: str = "tenant",
        scopes: tuple[str, ...] = (),
        limits: AdapterLimits | None = None,
    ) -> Caller:
        """Calls as that identity, whose tenant has these limits."""
        identity = msgspec.structs.replace(self.identity(tenant, role, scopes), limits=limits)
        token = self.signer.sign(identity, "registry")
        return Caller(self.http, {"Authorization": f"Bearer {token}"})

    def identity(self, tenant: str | None = "team-a", role: str = "tenant", scopes: tuple[str, ...] = ()) -> Identity:
        """Someone of `tenant` with `scopes`, or a platform key that looks at that tenant."""
        tenant_id = f"id-{tenant}" if tenant else None
        is_own = role == "tenant"
        return Identity(
            role=role,
            tenant_id=tenant_id if is_own else None,
            tenant=tenant if is_own else None,
            scopes=scopes or ("adapters:read", "adapters:write"),
            key_id=f"key_{role}_{tenant}",
            actor=f"{role}@{tenant}",
            request_id="req_test",
            target_tenant_id=tenant_id,
            target_tenant=tenant,
        )

    def objects(self) -> list[str]:
        """Every file in the store."""
        return sorted(str(path.relative_to(self.store)) for path in self.store.rglob("*") if path.is_file())


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def poison(safetensors: bytes) -> bytes:
    """The same file with one NaN at its end."""
    assert struct.unpack("<Q", safetensors[:8])[0] > 0
    return safetensors[:-4] + np.float32(np.nan).tobytes()
