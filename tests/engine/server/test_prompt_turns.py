"""Long prompts are tokenised one after the other, in the order of their tenants' turns; short ones wait for nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loraplex_engine.server.prompt import _LONG_TEXT_CHARS, PromptReader

LONG = "x" * (_LONG_TEXT_CHARS + 1)


class SlowTokenizer:
    """Notes whose texts it reads, and where; long ones take until the test lets them go."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.threads: set[int] = set()
        self.may_go = threading.Event()

    def min_tokens(self, text: str) -> int:
        return 1

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.order.append(text[0])
        self.threads.add(threading.get_ident())
        if len(text) > _LONG_TEXT_CHARS:
            assert self.may_go.wait(10)
        return [1]


@pytest.fixture
def tokenizer() -> SlowTokenizer:
    return SlowTokenizer()


@pytest.fixture
async def reader(tokenizer: SlowTokenizer) -> AsyncIterator[PromptReader]:
    found: Any = tokenizer
    prompts = PromptReader(found)
    yield prompts
    tokenizer.may_go.set()
    prompts.close()


async def test_a_tenant_with_many_long_prompts_holds_up_only_itself(
    reader: PromptReader, tokenizer: SlowTokenizer
) -> None:
    asked = [asyncio.create_task(reader.read_text("a" + LONG, 9, tenant_id="a")) for _ in range(6)]
    await asyncio.sleep(0)
    asked.append(asyncio.create_task(reader.read_text("b" + LONG, 9, tenant_id="b")))
    await asyncio.sleep(0)
    assert await reader.read_text("c", 9, tenant_id="c") == [1]
    tokenizer.may_go.set()
    await asyncio.gather(*asked)
    assert sorted(tokenizer.order[:2]) == ["a", "c"]
    # the first to wait had its turn before, and then it is the other's
    assert "".join(tokenizer.order[2:]) == "abaaaa"


async def test_who_leaves_gives_its_turn_to_others(reader: PromptReader, tokenizer: SlowTokenizer) -> None:
    asked = [asyncio.create_task(reader.read_text("a" + LONG, 9, tenant_id="a")) for _ in range(4)]
    await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    other = asyncio.create_task(reader.read_text("b" + LONG, 9, tenant_id="b"))
    await asyncio.gather(*asked, return_exceptions=True)
    tokenizer.may_go.set()
    assert await other == [1]
    assert tokenizer.order.count("a") <= 1


async def test_many_short_prompts_of_one_call_are_a_long_one(reader: PromptReader, tokenizer: SlowTokenizer) -> None:
    half = "h" * (_LONG_TEXT_CHARS // 2 + 1)
    assert await reader.read_prompts([half], 9) == [[1]]
    assert tokenizer.threads == {threading.get_ident()}
    assert await reader.read_prompts([half, half], 9) == [[1], [1]]
    assert len(tokenizer.threads) == 2
