"""What is charged: rows, engines and clients count the same, whatever becomes of a request, and of the gateway.

Requests of every sort run at once while a gateway is killed: whole and streamed, with and without usage, with several
choices and prompts, refused, out of time, left by their clients; at full length also through two gateways beside each
other, each of which is killed. At the end the rows are what the engine counted, and
what it sampled; a finished one's row is what its client counted, and one that was left lies between what its client
could read and one step more for each choice.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import pytest

from byte_client import ByteClient, build_request, connected
from conftest import skip_or_fail, upgrade_to_head
from databases import EmbeddedPostgres, Unavailable
from platforms import LivePlatform, Team, command_of, create_team, list_children, running_platform, wait_for
from redis_world import RedisUnavailable, running_redis
from server_process import ServerProcess
from support import free_port

BASE = "smollm2-135m"
NUM_REQUESTS, NUM_KILLS = 40, 1
NUM_IN_FULL, NUM_KILLS_IN_FULL = 2000, 3
STYLES = ("pirate", "json", "legal")
FLAGS = ("--dtype", "float32", "--max-loras", "2", "--max-model-len", "512")
_AT_ONCE = 8
BUSY = 503
_LEAVES = ("half", "half", "close", "reset")
_QUESTIONS = ("What is a library?", "What is the moon?", "Who wrote Hamlet?", "Why does it rain?", "What is tea?")
_COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens")


class Busy(Exception):
    """A refusal by a machine with too much to do, which has not begun the request."""


class Seen(NamedTuple):
    """What a client knows of one request when it is over."""

    sort: str
    request_id: str | None
    num_tokens: int
    """Read, or told by the usage of the answer."""
    prompt_tokens: int | None = None
    is_finished: bool = False
    num_choices: int = 1


@dataclass
class Reader:
    """Counts the tokens of a stream by its log-probabilities."""

    num_tokens: int = 0
    usage: dict[str, Any] | None = None
    is_over: bool = False
    has_failed: bool = False

    def take(self, line: str) -> None:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.is_over = True
        elif line.startswith("data: "):
            event = json.loads(data)
            self.has_failed |= "error" in event
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", []):
                self.num_tokens += len((choice.get("logprobs") or {}).get("content") or [])
                # the token that ended it is counted and has no text
                self.num_tokens += choice.get("finish_reason") == "stop"


class Door:
    """A gateway as clients know it; `is_open` while it runs."""

    def __init__(self, url: str) -> None:
        parsed = httpx.URL(url)
        self.address = (parsed.host, parsed.port or 80)
        self.http = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)
        self.is_open = True


class Who(NamedTuple):
    """A client: its key, and the gateway that it asks."""

    key: str
    door: Door

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


class Crowd:
    """Clients of all sorts against one platform, through any of its gateways."""

    def __init__(self, teams: list[Team], seed: int, urls: list[str]) -> None:
        self.teams = teams
        self.random = random.Random(seed)
        self.seen: list[Seen] = []
        self.doors = [Door(url) for url in urls]
        self.sorts: dict[str, Callable[[str, Who], Any]] = {
            "whole": self.send_whole,
            "completions": self.send_completions,
            "stream": self.send_stream,
            "stream with usage": self.send_stream_with_usage,
            "stopped": self.send_stopped,
            "refused": self.send_refused,
            "unknown": self.send_unknown,
            "late": self.send_late,
            "left": self.send_left,
            "left early": self.send_left_early,
        }

    async def send(self, number: int) -> None:
        """One request; one that is cut by the end of a gateway is seen as far as it came."""
        sort = list(self.sorts)[number % len(self.sorts)]
        team = self.random.choice(self.teams)
        model = self.random.choice([team.name, team.name, BASE])
        while not (doors := [door for door in self.doors if door.is_open]):  # noqa: ASYNC110 - they have no event
            await asyncio.sleep(0.05)
        try:
            self.seen.append(await self.sorts[sort](model, Who(team.key, self.random.choice(doors))))
        except (httpx.TransportError, ConnectionError, asyncio.IncompleteReadError):
            self.seen.append(Seen("cut", None, 0))
        except Busy:
            self.seen.append(Seen("busy", None, 0))

    async def send_whole(self, model: str, who: Who) -> Seen:
        answer = await self._post("chat/completions", self._chat(model, n=self.random.randint(1, 3)), who)
        return self._see("whole", answer)

    async def send_completions(self, model: str, who: Who) -> Seen:
        num_tokens = self.random.choice([0, 3, 6])
        body = {
            "model": model,
            "prompt": list(_QUESTIONS[:2]),
            "max_tokens": num_tokens,
            "echo": not num_tokens,
            "n": 2,
        }
        return self._see("completions", await self._post("completions", body, who))

    async def send_stopped(self, model: str, who: Who) -> Seen:
        """Ends by a stop string, which the model samples on beyond."""
        body = self._chat(model, stop=[" ", "e"], ignore_eos=True, max_tokens=24)
        return self._see("stopped", await self._post("chat/completions", body, who))

    async def send_stream(self, model: str, who: Who) -> Seen:
        return await self._stream("stream", self._chat(model, stream=True, n=self.random.randint(1, 3)), who)

    async def send_stream_with_usage(self, model: str, who: Who) -> Seen:
        body = self._chat(model, stream=True, stream_options={"include_usage": True})
        return await self._stream("stream with usage", body, who)

    async def send_late(self, model: str, who: Who) -> Seen:
        """Out of time before its first token, or in the middle."""
        body = self._chat(model, stream=True, max_tokens=300, ignore_eos=True)
        return await self._stream("late", body, who, **{"x-request-timeout": str(self.random.uniform(0.02, 0.5))})

    async def send_refused(self, model: str, who: Who) -> Seen:
        answer = await self._post("chat/completions", self._chat(model, max_tokens=100_000), who)
        assert answer.status_code == 400, answer.text
        return Seen("refused", answer.headers["x-request-id"], 0, 0)

    async def send_unknown(self, model: str, who: Who) -> Seen:
        answer = await self._post("chat/completions", self._chat(f"{model}-x"), who)
        assert answer.status_code == 404, answer.text
        return Seen("unknown", None, 0)

    async def send_left(self, model: str, who: Who) -> Seen:
        """Leaves in the middle of a stream: the whole connection, or its own side of it, and then reads to the end."""
        how, num_choices = self.random.choice(_LEAVES), self.random.randint(1, 3)
        body = self._chat(model, stream=True, max_tokens=300, ignore_eos=True, n=num_choices)
        async with connected(who.door.address) as client:
            await client.send(self._build(body, who))
            head = await client.read_head()
            if head.status == BUSY:
                raise Busy
            assert head.status == 200, head
            reader, lines, request_id = Reader(), _lines(client), head.headers["x-request-id"]
            for _ in range(self.random.randint(1, 12)):
                line = await anext(lines, None)
                if line is None:
                    return Seen("cut", request_id, reader.num_tokens)
                reader.take(line)
            client.leave(how)
            if how == "half":
                async for line in lines:
                    reader.take(line)
        assert not reader.is_over
        sort = "left and read" if how == "half" else "left"
        return Seen(sort, request_id, reader.num_tokens, num_choices=num_choices)

    async def send_left_early(self, model: str, who: Who) -> Seen:
        """Leaves before there is an answer."""
        async with connected(who.door.address) as client:
            await client.send(self._build(self._chat(model, max_tokens=300, ignore_eos=True), who))
            await asyncio.sleep(self.random.uniform(0, 0.1))
        return Seen("left early", None, 0)

    async def _post(self, route: str, body: dict[str, Any], who: Who) -> httpx.Response:
        answer = await who.door.http.post(f"/v1/{route}", json=body, headers=who.headers)
        if answer.status_code == BUSY:
            raise Busy
        return answer

    async def _stream(self, sort: str, body: dict[str, Any], who: Who, **headers: str) -> Seen:
        headers |= who.headers
        reader, request_id = Reader(), None
        try:
            async with who.door.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                request_id = answer.headers["x-request-id"]
                if answer.status_code == BUSY:
                    raise Busy
                if answer.status_code != 200:
                    return Seen(sort, request_id, 0)
                async for line in answer.aiter_lines():
                    reader.take(line)
        except httpx.TransportError:
            return Seen("cut", request_id, reader.num_tokens)
        prompt = None
        if reader.usage is not None:
            assert reader.usage["completion_tokens"] == reader.num_tokens
            prompt = reader.usage["prompt_tokens"]
        return Seen(sort, request_id, reader.num_tokens, prompt, is_finished=reader.is_over)

    def _see(self, sort: str, answer: httpx.Response) -> Seen:
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]
        return Seen(
            sort, answer.headers["x-request-id"], used["completion_tokens"], used["prompt_tokens"], is_finished=True
        )

    def _chat(self, model: str, **fields: Any) -> dict[str, Any]:
        content = f"{self.random.choice(_QUESTIONS)} {self.random.randrange(20)}"
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 6, "logprobs": True}
        return {**body, "seed": self.random.randrange(1000), **fields}

    def _build(self, body: dict[str, Any], who: Who) -> bytes:
        return build_request("/v1/chat/completions", json.dumps(body).encode(), who.headers)


async def _lines(client: ByteClient) -> AsyncIterator[str]:
    """Lines of an answer in chunks, until the other side ends it."""
    try:
        while True:
            line = (await client.read_until(b"\n")).decode().rstrip()
            if line.startswith("data: "):
                yield line
    except (asyncio.IncompleteReadError, ConnectionError):
        return


def find_gateway(platform: LivePlatform) -> int:
    (pid,) = (pid for pid in list_children(platform.process.pid) if "loraplex gateway" in command_of(pid))
    return pid


def kill_gateway(platform: LivePlatform) -> None:
    """End it without a word; its supervisor starts another."""
    pid = find_gateway(platform)
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return httpx.get(f"{platform.url}/readyz", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(lambda: is_back() and find_gateway(platform) != pid, 60)


Kill = tuple[int, Callable[[], None]]
"""Which of the gateways, by its number, and what kills it and brings it back."""


async def run(crowd: Crowd, num_requests: int, kills: list[Kill]) -> None:
    """Send all, and kill a gateway now and then while they run."""
    numbers = iter(range(num_requests))

    async def work() -> None:
        for number in numbers:
            await crowd.send(number)

    workers = [asyncio.create_task(work()) for _ in range(_AT_ONCE)]
    for index, (number, kill) in enumerate(kills):
        while len(crowd.seen) < (index + 1) * num_requests // (len(kills) + 1):  # noqa: ASYNC110 - they have no event
            await asyncio.sleep(0.01)
        crowd.doors[number].is_open = False
        await asyncio.to_thread(kill)
        crowd.doors[number].is_open = True
    await asyncio.gather(*workers)
    for door in crowd.doors:
        await door.http.aclose()


@pytest.mark.endure
def test_rows_engine_and_clients_count_the_same(
    platform: LivePlatform, teams: dict[str, Team], request: pytest.FixtureRequest
) -> None:
    is_full = request.config.getoption("--endure")
    num_requests, num_kills = (NUM_IN_FULL, NUM_KILLS_IN_FULL) if is_full else (NUM_REQUESTS, NUM_KILLS)
    kills = [(0, lambda: kill_gateway(platform))] * num_kills
    check_counts(platform, list(teams.values()), [platform.url], num_requests, kills)


@pytest.mark.endure
def test_two_gateways_count_as_one(
    smollm2_base: Path, shared: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--endure"):
        pytest.skip("a platform of its own for what one gateway is held to: only at full length")
    with running_platform(tmp_path / "data", *FLAGS, env=shared) as platform:
        teams = [create_team(platform, f"team-{style}", style) for style in STYLES]
        other = build_second_gateway(platform, tmp_path, shared)
        other.start()

        def kill_other() -> None:
            other.kill()
            # longer than the first waits until it takes over what the other has begun
            time.sleep(10)
            other.start()

        try:
            kills: list[Kill] = [(1, kill_other), (0, lambda: kill_gateway(platform)), (1, kill_other)]
            check_counts(platform, teams, [platform.url, other.url], NUM_IN_FULL, kills)
        finally:
            other.kill()


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings by which gateways share a database and Redis."""
    if not request.config.getoption("--endure"):
        yield {}
        return
    with ExitStack() as stack:
        try:
            server = EmbeddedPostgres(Path(stack.enter_context(TemporaryDirectory(prefix="lpx-pg-"))))
            server.start()
            stack.callback(server.stop)
            redis = stack.enter_context(running_redis())
        except (Unavailable, RedisUnavailable) as reason:
            skip_or_fail("postgres and redis", str(reason))
        url = server.url.replace("postgresql://", "postgresql+psycopg://")
        upgrade_to_head(url)
        yield {"LORAPLEX_DATABASE_URL": url, "LORAPLEX_REDIS_URL": redis.url}


def build_second_gateway(platform: LivePlatform, folder: Path, shared: dict[str, str]) -> ServerProcess:
    """Return a gateway beside a platform's own: the same database, Redis, objects, keys and engine."""
    with platform.management() as client:
        (engine,) = client.list_fleet()
    data, port = platform.data_dir, free_port()
    files = {
        "SIGNING_KEY": "signing.pem",
        "KEY_PEPPER": "key.pepper",
        "ADMIN_KEY": "admin.key",
        "ENGINE_KEY": "engine.key",
    }
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")},
        **{f"LORAPLEX_{name}_FILE": str(data / file) for name, file in files.items()},
        **shared,
        "LORAPLEX_DATA_DIR": str(folder / "second"),
        "LORAPLEX_OBJECT_STORE_URL": f"file://{data}/objects",
        "LORAPLEX_LISTEN": f"127.0.0.1:{port}",
        "LORAPLEX_POOLS": json.dumps({"main": {"base": BASE, "engines": [engine.url]}}),
        "LORAPLEX_PARITY_GATE": "off",
    }
    return ServerProcess([sys.executable, "-m", "loraplex", "gateway"], environ, folder / "second.log", port, "/readyz")


def check_counts(
    platform: LivePlatform, teams: list[Team], urls: list[str], num_requests: int, kills: list[Kill]
) -> None:
    """Let a crowd ask while gateways are killed, and fail unless all count the same at the end."""
    seed = int.from_bytes(os.urandom(4))
    began_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    before = platform.engine_state()
    crowd = Crowd(teams, seed, urls)
    asyncio.run(run(crowd, num_requests, kills))
    platform.wait_idle()
    with platform.management() as client:
        wait_for(lambda: client.reconcile_usage().data[0].pending.requests == 0, 90)
        (engine,) = client.reconcile_usage().data
        rows = {row["request_id"]: row for row in client.list_usage_rows(**{"from": began_at})}
    assert engine.is_exact, f"seed {seed}: {engine}"
    # those that their gateway had not sent yet when it was killed
    lost = [row for row in rows.values() if row["outcome"] == "lost"]
    assert sum(row["prompt_tokens"] + row["completion_tokens"] for row in lost) == 0
    check_sampled(before, platform.engine_state())
    over = [check_row(one, rows) for one in crowd.seen if one.request_id is not None]
    sorts = Counter(one.sort for one in crowd.seen)
    left = Counter(one for one in over if one is not None)
    print(
        f"seed {seed}: {dict(sorts)}; {len(rows)} rows, {len(lost)} of them lost; "
        f"tokens beyond what was read, of {left.total()} left: {left}; {engine}"
    )
    assert sorts["left and read"] > 0
    assert sum(one.is_finished for one in crowd.seen) > num_requests / 4


def test_commands_tell_what_answered_a_request_and_what_it_cost(platform: LivePlatform, teams: dict[str, Team]) -> None:
    team = teams["pirate"]
    chats: Any = platform.openai(team.key).chat.completions.with_raw_response
    answer = chats.create(model=team.name, messages=[{"role": "user", "content": _QUESTIONS[0]}], max_tokens=3)
    request_id, used = answer.headers["x-request-id"], answer.parse().usage
    (event,) = json.loads(platform.cli("audit", "--request", request_id, "--json").stdout)
    assert (event["subject"], event["actor"]) == (f"{team.name}/default@1", "bootstrap")
    assert (event["details"]["digest"], event["details"]["model"]) == (team.digest, team.name)
    listed = platform.cli("usage", "requests", "--digest", team.digest, "--limit", "1", "--json", key=team.key)
    (row,) = json.loads(listed.stdout)
    assert (row["request_id"], row["completion_tokens"]) == (request_id, used.completion_tokens)
    told = platform.cli("usage", "reconcile")
    assert told.returncode == 0, told.stdout + told.stderr


def check_sampled(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Fail unless the front charged what the core sampled, but for what came behind stop strings."""
    charged = ("completion_tokens", "discarded_tokens")
    counted = sum(after["usage"][name] - before["usage"][name] for name in charged)
    assert counted == after["sampled_tokens"] - before["sampled_tokens"]
    assert after["usage"]["load_bytes"] > before["usage"]["load_bytes"]


def check_row(seen: Seen, rows: dict[str, dict[str, Any]]) -> int | None:
    """Fail unless the row is what the client knows; return how many tokens a reader who left did not read."""
    assert seen.request_id is not None
    row = rows[seen.request_id]
    charged = row["completion_tokens"]
    assert charged >= seen.num_tokens, (seen, row)
    if seen.is_finished:
        assert (row["outcome"], charged) == ("ok", seen.num_tokens), (seen, row)
    if seen.prompt_tokens is not None:
        assert row["prompt_tokens"] == seen.prompt_tokens, (seen, row)
    if seen.sort != "left and read":
        return None
    assert row["outcome"] == "cancelled", (seen, row)
    assert charged <= seen.num_tokens + seen.num_choices, (seen, row)
    return int(charged - seen.num_tokens)
