"""Redis, by which gateways share limits and epochs: version, scripts, eviction, clock."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loraplex.doctor.finding import Finding, judge_clock, judge_latency
from loraplex.doctor.patient import Patient
from loraplex.settings import check_redis_url

if TYPE_CHECKING:
    from redis import Redis

_OLDEST = (6, 2)
_SKEW_WARN_S, _SKEW_FAIL_S = 2.0, 30.0
_SCRIPT = "redis.call('SET', KEYS[1], ARGV[1], 'PX', 1000) return redis.call('GET', KEYS[1])"
_KEY = "loraplex:doctor"


def check_redis(patient: Patient) -> Iterator[Finding]:
    """Look at the Redis of the settings."""
    told = patient.value("LORAPLEX_REDIS_URL")
    url = check_redis_url(told) if told is not None else None
    if url is None:
        why = "Limits are counted in the gateway's own memory: there is one gateway." if told else "Not for this part."
        yield Finding("redis.reachable", "skip", why)
        return
    if (patient.value("LORAPLEX_DATABASE_URL") or "").startswith("sqlite"):
        why = "LORAPLEX_REDIS_URL is not used: with SQLite there is one gateway, which counts limits by itself."
        yield Finding("redis.reachable", "warn", why, "Unset it, or give several gateways one Postgres.")
        return
    from redis import Redis
    from redis.exceptions import AuthenticationError, RedisError

    half = patient.limit_s / 2
    server = Redis.from_url(url, socket_timeout=half, socket_connect_timeout=half, decode_responses=True)
    try:
        yield from _look(server)
    except AuthenticationError:
        why = "Redis refuses user or password."
        yield Finding("redis.reachable", "fail", why, "Correct them in LORAPLEX_REDIS_URL.")
    except (RedisError, OSError) as error:
        remedy = "Check LORAPLEX_REDIS_URL, the network, and that the server runs and lets this user do it."
        yield Finding("redis.reachable", "fail", f"Redis does not serve: {error}", remedy)
    finally:
        server.close()


def _look(server: Redis) -> Iterator[Finding]:
    server.ping()
    yield Finding("redis.reachable", "ok", "Redis answers.")
    # the first one has connected too
    began_at = time.perf_counter()
    server.ping()
    slow = "Bring Redis closer to the gateways: after 250 ms limits are enforced by each gateway alone."
    yield judge_latency("redis.latency", time.perf_counter() - began_at, slow)
    facts: dict[str, Any] = server.info()
    yield _judge_version(str(facts.get("redis_version", "")))
    yield _judge_eviction(facts)
    if facts.get("cluster_enabled"):
        remedy = "Use one server, with replicas if you like."
        yield Finding("redis.cluster", "fail", "Redis Cluster: one script spans keys of several slots.", remedy)
    yield _judge_clock(server)
    if server.eval(_SCRIPT, 1, _KEY, "yes") == "yes":
        yield Finding("redis.scripts", "ok", "Lua scripts run.")
    else:
        yield Finding("redis.scripts", "fail", "Lua scripts give other answers.", "Use Redis or Valkey itself.")


def _judge_version(version: str) -> Finding:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers >= _OLDEST:
        return Finding("redis.version", "ok", f"Redis {version}.")
    return Finding("redis.version", "fail", f"Redis {version} is too old.", "Use Redis 6.2 or newer, or Valkey.")


def _judge_eviction(facts: dict[str, Any]) -> Finding:
    policy, most = str(facts.get("maxmemory_policy", "unknown")), int(facts.get("maxmemory", 0))
    if policy == "noeviction":
        return Finding("redis.eviction", "ok", "What is counted is never evicted (noeviction).")
    remedy = "CONFIG SET maxmemory-policy noeviction, and the same in the server's configuration."
    if not most:
        return Finding("redis.eviction", "warn", f"maxmemory-policy is {policy}, without maxmemory so far.", remedy)
    return Finding("redis.eviction", "fail", f"Under memory pressure Redis forgets limits ({policy}).", remedy)


def _judge_clock(server: Redis) -> Finding:
    before = time.time()
    seconds, micros = server.time()
    ahead_s = int(seconds) + int(micros) / 1e6 - (before + time.time()) / 2
    why = "limits are counted by its minutes, days and months"
    return judge_clock("redis.clock", ahead_s, whose="Redis' clock", warn_s=_SKEW_WARN_S, fail_s=_SKEW_FAIL_S, why=why)
