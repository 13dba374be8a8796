"""Records what a real engine answers, for `replay.py`: `python tests/bench/record.py`, half a minute.

One whole answer and one stream of 32 tokens by an example adapter on SmolLM2-135M, as they leave the engine's socket.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loraplex_engine.wire import done
from loraplex_registry.wire.identity import Identity, TokenSigner
from platforms import LivePlatform, create_team, running_platform

RECORDINGS = Path(__file__).resolve().parent / "recordings"
_NUM_TOKENS = 32
_QUESTION = "Where is the nearest harbour?"
_LONGEST_S = 60.0
_REQUEST_ID = "req_00000000000000000000000000"


def record(platform: LivePlatform, digest: str, name: str, *, is_stream: bool) -> None:
    """Send one request to the engine itself and keep its answer, with a digest of zeros."""
    fields = {
        "model": digest,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": is_stream,
        **({"stream_options": {"include_usage": True}} if is_stream else {}),
    }
    body = json.dumps(fields).encode()
    identity = Identity(
        role="tenant",
        tenant_id="bench",
        tenant="bench",
        scopes=("infer",),
        key_id="bench",
        actor="bench",
        request_id=_REQUEST_ID,
    )
    signer = TokenSigner((platform.data_dir / "signing.pem").read_bytes())
    with platform.management() as client:
        (engine,) = client.list_fleet()
    where = urlsplit(engine.url)
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: {where.netloc}",
        f"authorization: Bearer {signer.sign(identity, 'engine')}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"{done.DONE}: 1",
        f"{done.REQUEST_ID}: {_REQUEST_ID}",
        f"{done.TENANT_ID}: bench",
        f"{done.ECHO_MODEL}: team-bench",
    ]
    answer = b""
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        # not closed by a header, so that the head says nothing of it: clients of the replay may go on
        connection.settimeout(_LONGEST_S)
        while not answer.endswith((b"}", b"0\r\n\r\n")):
            answer += connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    (RECORDINGS / name).write_bytes(answer.replace(digest.encode(), b"sha256:" + b"0" * 64))


def main() -> int:
    """Record both."""
    RECORDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running_platform(Path(folder) / "data") as platform:
        team = create_team(platform, "team-bench", "pirate")
        record(platform, team.digest, "whole.http", is_stream=False)
        record(platform, team.digest, "stream.http", is_stream=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
