"""What tests of limits do with a gateway: teams with limits, calls of a known cost, streams that stay open."""

from __future__ import annotations

from contextlib import AsyncExitStack

import httpx

from gateway_world import BASE, GatewayWorld

TEAM = "team-x"


async def make_team(world: GatewayWorld, name: str = TEAM, **limits: int) -> str:
    """A team with limits; return a key of it."""
    await world.create_tenant(name, limits=limits)
    return await world.create_key(name)


async def ask(world: GatewayWorld, key: str, prompt: str = "answer", max_tokens: int = 48) -> httpx.Response:
    """One call of the base; `answer` reserves 2 tokens and `max_tokens`, and costs 7 and 5."""
    return await world.complete(BASE, prompt, key, fields={"max_tokens": max_tokens})


def code_of(answer: httpx.Response) -> str:
    """The slug of a refusal."""
    return str(answer.json()["error"]["code"])


class Streams:
    """Streams that stay open until they are told to end."""

    def __init__(self, world: GatewayWorld) -> None:
        self._world = world
        self._stack = AsyncExitStack()
        self.opened: list[httpx.Response] = []
        self.refused: list[httpx.Response] = []

    async def open(self, key: str, prompt: str = "pause", max_tokens: int = 48) -> httpx.Response:
        """Open one more; what is refused is read."""
        stream = self._world.stream(BASE, prompt, key, max_tokens=max_tokens)
        answer = await self._stack.enter_async_context(stream)
        if answer.status_code != 200:
            await answer.aread()
        (self.opened if answer.status_code == 200 else self.refused).append(answer)
        return answer

    async def finish(self) -> None:
        """Let all come to their end, and read them to it."""
        self._world.engine.go_on.set()
        for answer in self.opened:
            await answer.aread()
        await self._stack.aclose()

    async def leave(self) -> None:
        """Go away from all."""
        await self._stack.aclose()
