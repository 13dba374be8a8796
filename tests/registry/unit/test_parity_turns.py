"""Turns at the parity gate: one holder at a time, tenants in turn, and none is lost to whoever gives up."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from loraplex_registry.parity.turns import TenantTurns


async def test_a_tenant_with_much_delays_another_by_one_turn() -> None:
    turns, served = TenantTurns(), list[str]()

    async def measure(tenant: str, name: str) -> None:
        async with turns.take(tenant):
            served.append(name)
            await asyncio.sleep(0)

    names = ["a1", "a2", "a3", "a4", "b1", "c1", "b2"]
    await asyncio.gather(*(measure(name[0], name) for name in names))
    assert served == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 2, 5]), st.booleans()), max_size=30), st.randoms()
)
def test_whoever_gives_up_takes_no_turn_along(comers: list[tuple[str, int, bool]], chance: random.Random) -> None:
    async def run() -> None:
        turns, served, held = TenantTurns(), list[int](), list[int]()

        async def measure(tenant: str, steps: int, number: int) -> None:
            async with turns.take(tenant):
                held.append(number)
                try:
                    for _ in range(steps):
                        await asyncio.sleep(0)
                        assert held == [number]
                finally:
                    held.remove(number)
            served.append(number)

        tasks = [asyncio.create_task(measure(tenant, steps, i)) for i, (tenant, steps, _) in enumerate(comers)]
        leavers = [task for task, (_, _, leaves) in zip(tasks, comers, strict=True) if leaves]
        for task in leavers:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
            async with turns.take("last"):
                pass
        assert {i for i, (*_, leaves) in enumerate(comers) if not leaves} <= set(served)
        assert not held

    asyncio.run(run())
