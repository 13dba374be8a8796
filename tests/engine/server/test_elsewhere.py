"""Routes that are not served say what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripted_core import running_rig
from toy_tokenizers import write_byte_level

ELSEWHERE = [
    ("POST", "/v1/embeddings", "embeddings_not_served"),
    ("POST", "/v1/responses", "use_chat_completions"),
    ("GET", "/v1/responses/resp_1", "use_chat_completions"),
    ("POST", "/v1/responses/resp_1/cancel", "use_chat_completions"),
    ("DELETE", "/v1/responses/resp_1", "use_chat_completions"),
]


@pytest.mark.parametrize(("method", "path", "code"), ELSEWHERE)
async def test_a_route_that_is_not_served_says_what_to_use(tmp_path: Path, method: str, path: str, code: str) -> None:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as rig:
        answer = await rig.http.request(method, path)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["type"], error["param"]) == (code, "invalid_request_error", None)
        refused = await rig.http.request(method, path, headers={"authorization": "Bearer no"})
        assert refused.status_code == 401
