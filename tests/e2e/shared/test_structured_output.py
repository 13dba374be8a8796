"""A real model held to schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from openai_answer import Answer, read_answer
from platforms import LivePlatform
from schema_outputs import check_many


@pytest.mark.endure
def test_outputs_of_a_real_model_are_valid(platform: LivePlatform, long: Callable[[float, float], float]) -> None:
    headers = {"authorization": f"Bearer {platform.admin_key}"}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=300) as http:

        def ask(index: int, fields: dict[str, Any]) -> Answer:
            body = {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": f"Write JSON, {index}"}],
                **fields,
            }
            answer = http.post("/v1/chat/completions", json=body)
            return read_answer("chat", answer.status_code, answer.content, is_stream=False)

        check_many(ask, int(long(1, 200)), seed=2)
