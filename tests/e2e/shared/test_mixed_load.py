"""Many requests of every sort at once: each ends as it should, and everything held is given back."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from platforms import LivePlatform, Team

BASE = "smollm2-135m"
QUESTIONS = ("What is a library?", "What is the moon?", "Who wrote Hamlet?", "Why does it rain?", "What is tea?")
_MAX_TOKENS = 8


class Load:
    """Sends requests of random sorts with one administrator's key and judges each answer by the one given alone."""

    def __init__(self, platform: LivePlatform, models: list[str], num_questions: int) -> None:
        self._client = platform.openai()
        self._pairs = [(model, question) for model in models for question in QUESTIONS[:num_questions]]
        self._alone = {pair: self._ask(*pair) for pair in self._pairs}

    def send(self, seed: int) -> str:
        """One request; returns its sort."""
        rng = random.Random(seed)
        pair = rng.choice(self._pairs)
        sort = rng.choice(["whole", "whole", "stream", "stream", "left", "choices", "refused"])
        getattr(self, f"_send_{sort}")(*pair)
        return sort

    def _send_whole(self, model: str, question: str) -> None:
        assert self._ask(model, question) == self._alone[model, question]

    def _send_stream(self, model: str, question: str) -> None:
        chunks = self._create(model, question, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == self._alone[model, question]

    def _send_left(self, model: str, question: str) -> None:
        stream = self._create(model, question, stream=True, max_tokens=300, extra_body={"ignore_eos": True})
        next(stream)
        stream.close()

    def _send_choices(self, model: str, question: str) -> None:
        answer = self._create(model, question, n=2)
        assert [choice.message.content for choice in answer.choices] == [self._alone[model, question]] * 2

    def _send_refused(self, model: str, question: str) -> None:
        with pytest.raises(openai.BadRequestError):
            self._create(model, question, temperature=-1)

    def _ask(self, model: str, question: str) -> str:
        return self._create(model, question).choices[0].message.content or ""

    def _create(self, model: str, question: str, **fields: Any) -> Any:
        messages = [{"role": "user", "content": question}]
        options = {"temperature": 0, "max_tokens": _MAX_TOKENS, **fields}
        return self._client.chat.completions.create(model=model, messages=messages, **options)  # type: ignore[call-overload]


@pytest.mark.endure
def test_many_mixed_requests_leave_nothing_behind(
    platform: LivePlatform, teams: dict[str, Team], long: Callable[[float, float], float]
) -> None:
    load = Load(platform, [BASE, *(team.name for team in teams.values())], int(long(2, 5)))
    with ThreadPoolExecutor(16) as pool:
        sorts = list(pool.map(load.send, range(int(long(30, 48)))))
    assert len(set(sorts)) == 5
    platform.wait_idle()
    assert len(platform.engine_state()["slots"]) == 2
