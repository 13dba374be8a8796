"""The sandbox: tasks that take too much end in a refusal, harm no other task, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex_engine.errors import InvalidRequestError, NotReadyError
from loraplex_engine.server.chat_template import Chat
from loraplex_engine.server.sandbox import process
from loraplex_engine.server.sandbox.client import Sandbox
from loraplex_engine.server.sandbox.task import MAX_ANSWER_BYTES, InspectTask, Refused, RenderTask, Text
from loraplex_engine.server.sandbox.turn import Turns

CHAT = Chat([{"role": "user", "content": "Hi \U0001fae0"}])
SIMPLE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HOSTILE = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "fill": "{% for a in range(99999) %}{% set x = 'x' * 300000000 %}{% endfor %}",
    "join": "{% for a in range(99999) %}{% set x = range(99999) | join(',') %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "memory": "{{ 'x' * 3000000000 }}",
    "output": "{% for a in range(9000) %}{{ 'x' * 10000 }}{% endfor %}",
    "doubling": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "recursion": "{% macro a(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.environ }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "mutation": "{{ messages.append(1) }}",
    "surrogate": "{{ '\\ud83d' }}",
    "padding": "{{ '%99999999999d' % 1 }}",
    "width": "{{ 'x'.ljust(99999999999) }}",
    "syntax": "{% for %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested": "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "regex": "{{ messages | map('nothing') | list }}",
}

# what these ask for does not exist, so they write nothing
HARMLESS = {"format": "", "globals": ""}


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


async def render(sandbox: Sandbox, source: str, chat: Chat = CHAT, tenant_id: str = "") -> str:
    inspected = await sandbox.inspect(source, tenant_id=tenant_id)
    return await sandbox.render(RenderTask(inspected.code, chat, {"bos_token": "<s>"}), tenant_id=tenant_id)


async def test_a_template_is_rendered_with_all_that_a_chat_may_hold(sandbox: Sandbox) -> None:
    assert await render(sandbox, SIMPLE) == "<s>user: Hi \U0001fae0\n"
    odd: dict[str, Any] = {"role": "user", "content": None, "big": 2**200, "small": 1e-300, "null": None, "list": [{}]}
    assert await render(sandbox, "{{ messages | tojson }}", Chat([odd])) == (
        f'[{{"role": "user", "content": null, "big": {2**200}, "small": 1e-300, "null": null, "list": [{{}}]}}]'
    )


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_template_is_refused_within_a_second(sandbox: Sandbox, name: str) -> None:
    await render(sandbox, SIMPLE)
    began_at = time.monotonic()
    if name in HARMLESS:
        assert await render(sandbox, HOSTILE[name]) == HARMLESS[name]
    else:
        with pytest.raises(InvalidRequestError) as caught:
            await render(sandbox, HOSTILE[name])
        assert caught.value.param == "messages"
    # a second on an idle machine; one that runs tests has other things to do
    assert time.monotonic() - began_at < 30
    assert await render(sandbox, SIMPLE) == "<s>user: Hi \U0001fae0\n"
    assert sandbox.num_starts == 1


async def test_memory_runs_out_before_time_does(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequestError, match="takes too much memory"):
        await render(sandbox, "{{ (messages[0].role * 200000000) | length }}")


async def test_no_secret_is_in_the_environment_of_the_process(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_ENGINE_KEY", "secret")
    await render(sandbox, SIMPLE)
    environment = Path(f"/proc/{sandbox.pid}/environ")
    assert b"LORAPLEX" not in await asyncio.to_thread(environment.read_bytes)


async def test_a_task_of_a_tenant_that_wastes_time_does_not_hold_up_another(sandbox: Sandbox) -> None:
    await render(sandbox, SIMPLE)
    wasted = [asyncio.create_task(render(sandbox, HOSTILE["loop"], tenant_id="a")) for _ in range(4)]
    await asyncio.sleep(0.05)
    await render(sandbox, SIMPLE, tenant_id="b")
    num_ended = sum(task.done() for task in wasted)
    for result in await asyncio.gather(*wasted, return_exceptions=True):
        assert isinstance(result, (InvalidRequestError, NotReadyError))
    assert num_ended < len(wasted)


@pytest.mark.parametrize("is_group", [True, False])
async def test_a_process_that_was_killed_is_replaced_unseen(sandbox: Sandbox, is_group: bool) -> None:
    await render(sandbox, SIMPLE)
    assert sandbox.pid is not None
    (os.killpg if is_group else os.kill)(sandbox.pid, signal.SIGKILL)
    assert await render(sandbox, SIMPLE) == "<s>user: Hi \U0001fae0\n"
    assert sandbox.num_starts == 2


async def test_a_process_that_is_stopped_is_ended_in_bounded_time(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await render(sandbox, SIMPLE)
    assert sandbox.pid is not None
    os.kill(sandbox.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("loraplex_engine.server.sandbox.client._START_S", 0.3)
        with pytest.raises(NotReadyError):
            await render(sandbox, SIMPLE)
    assert await render(sandbox, SIMPLE) == "<s>user: Hi \U0001fae0\n"


async def test_a_machine_that_starts_no_process_is_busy_not_broken(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/nowhere/python")
        sandbox.start()
        with pytest.raises(NotReadyError):
            await render(sandbox, SIMPLE)
    assert await render(sandbox, SIMPLE) == "<s>user: Hi \U0001fae0\n"


async def test_a_caller_that_goes_away_leaves_its_place(sandbox: Sandbox) -> None:
    await render(sandbox, SIMPLE)
    tasks = [asyncio.create_task(render(sandbox, HOSTILE["loop"], tenant_id=str(index))) for index in range(8)]
    await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sandbox._turns.is_idle
    assert await render(sandbox, SIMPLE) == "<s>user: Hi \U0001fae0\n"


async def test_turns_rotate_among_tenants_and_waits_are_bounded() -> None:
    turns, order = Turns(2, 0.2), list[str]()

    async def work(tenant_id: str, taken_s: float = 0.01) -> None:
        async with turns.take(tenant_id):
            order.append(tenant_id)
            await asyncio.sleep(taken_s)

    await asyncio.gather(*(work(tenant) for tenant in "aaaabb"))
    assert sorted(order[:2]) == ["a", "b"]
    assert sorted(order[:4]) == ["a", "a", "b", "b"]
    assert turns.is_idle
    slow = asyncio.create_task(work("a", 0.5))
    await asyncio.sleep(0)
    with pytest.raises(NotReadyError):
        await work("a")
    await slow
    assert turns.is_idle


async def test_half_of_a_character_in_a_template_is_said_to_be_that(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        await render(sandbox, HOSTILE["surrogate"])
    assert caught.value.param == "messages"


def test_a_task_that_fails_in_an_unforeseen_way_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(process, "run_task", fail)
    answer = msgspec.msgpack.decode(process._make_answer(InspectTask("x")), type=Refused)
    assert (answer.param, "ended unexpectedly (KeyError)" in answer.message) == ("messages", True)


def test_an_answer_that_is_too_large_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "run_task", lambda _: Text("x" * (MAX_ANSWER_BYTES + 1)))
    assert "more than 16 MiB" in msgspec.msgpack.decode(process._make_answer(InspectTask("x")), type=Refused).message


async def test_a_task_that_its_limits_ended_is_tried_once_more(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, ended = sandbox._try, [b""]

    async def try_(payload: bytes, param: str) -> bytes | None:
        return ended.pop() if ended else await tried(payload, param)

    monkeypatch.setattr(sandbox, "_try", try_)
    assert await render(sandbox, SIMPLE) == "<s>user: Hi \U0001fae0\n"
    ended += [b"", b""]
    with pytest.raises(InvalidRequestError, match="more than 250 ms"):
        await sandbox.inspect(SIMPLE)
    assert ended == []
