"""A connection to Redis that was cut is an error of Redis also under uvloop, which raises another of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NoConnectionError

from loraplex.db.redis_client import open_redis
from redis_world import RedisServer

pytestmark = pytest.mark.enable_socket


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


@pytest.mark.parametrize("is_bounded", [False, True])
def test_writing_to_a_connection_that_is_closed_is_an_error_of_redis(
    redis_server: RedisServer, is_bounded: bool
) -> None:
    async def work() -> None:
        async with open_redis(redis_server.url, is_bounded=is_bounded, max_connections=1) as client:
            pool: Any = client.connection_pool
            connection = await pool.get_connection()
            connection._writer.transport.abort()
            with pytest.raises(NoConnectionError, match="closed"):
                await connection.send_command("PING")
            await pool.release(connection)
            assert await client.get("x") is None

    run(work)


def test_what_was_cut_before_it_was_asked_is_asked_again(redis_server: RedisServer) -> None:
    async def work() -> None:
        async with open_redis(redis_server.url, max_connections=1, retry=Retry(NoBackoff(), 1)) as client:
            assert await client.get("x") is None
            pool: Any = client.connection_pool
            connection = await pool.get_connection()
            send, cuts = connection.send_packed_command, [True]

            async def cut_once(*arguments: object, **options: object) -> None:
                if cuts:
                    cuts.clear()
                    connection._writer.transport.abort()
                await send(*arguments, **options)

            connection.send_packed_command = cut_once
            await pool.release(connection)
            assert await client.get("x") is None
            assert cuts == []

    run(work)
