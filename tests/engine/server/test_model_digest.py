"""A model's own digest names it: whoever asks so is answered by exactly these files, or not at all."""

from __future__ import annotations

from pathlib import Path

import msgspec

from scripted_core import BASE, DIGEST, running_rig
from toy_tokenizers import write_byte_level

CHAT = "/v1/chat/completions"
OWN = "sha256:" + "e" * 64


async def test_its_own_digest_names_the_base_and_no_other_does(tmp_path: Path) -> None:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as rig:
        body = {"model": OWN, "messages": [{"role": "user", "content": "hi"}]}
        await rig.post(CHAT, body)
        assert rig.core.added[-1].digest == OWN, "without a digest of its own it is an adapter's"
        assert rig.client.facts is not None
        rig.client.facts = msgspec.structs.replace(rig.client.facts, digest=OWN)
        answer = await rig.post(CHAT, body)
        assert (answer.status_code, answer.headers["x-loraplex-digest"]) == (200, "base")
        assert rig.core.added[-1].digest is None
        await rig.post(CHAT, body | {"model": DIGEST})
        assert rig.core.added[-1].digest == DIGEST
        await rig.post(CHAT, body | {"model": BASE})
        assert rig.core.added[-1].digest is None
        assert (await rig.http.get("/internal/state")).json()["model"]["digest"] == OWN
