"""Fuzz targets of the gateway: keys, names, bodies, queries, logins, settings, what Redis and name servers answer."""

from __future__ import annotations

import contextlib
import functools
import json
import posixpath
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from fuzz_registry import build_request, split_request
from fuzz_target import JSON_WORDS, Target, run_async, try_each
from loraplex.backup.errors import BackupError
from loraplex.backup.manifest import MANIFEST, BackupManifest, encode_manifest, read_manifest, seal
from loraplex.bench.errors import BenchError
from loraplex.bench.trace import read_trace
from loraplex.client.connection import decode, read_error
from loraplex.client.errors import ClientError
from loraplex.dashboard.cookie import build_cookie, is_loopback, read_cookie
from loraplex.dashboard.door import check_origin
from loraplex.dashboard.routes.entrance import _check_next
from loraplex.db.epoch_bus import BusError, RedisBus
from loraplex.errors import LoraplexError
from loraplex.fleet.discovery import Discovery
from loraplex.fleet.pools import parse_pools
from loraplex.gateway.authentication import Authenticator
from loraplex.gateway.body import convert, parse_time, read_body
from loraplex.gateway.call import parse_call
from loraplex.gateway.edge import _find_client_id, _is_private
from loraplex.gateway.inference import read_canary_key, read_timeout
from loraplex.gateway.names import NameIndex
from loraplex.gateway.paging import read_mark, read_page
from loraplex.gateway.prefix import find_prefix
from loraplex.gateway.problem import describe
from loraplex.gateway.resolution import Caller, resolve
from loraplex.gateway.routes import escalations, keys, tenants, usage
from loraplex.gateway.routes.reports import read_event_query
from loraplex.gateway.tries import RedisTries
from loraplex.plan.planner import build_plan
from loraplex.plan.shape import read_shape
from loraplex.plan.spec import PlanSpec
from loraplex.quotas.estimate import estimate_tokens
from loraplex.quotas.meter import MeterError
from loraplex.quotas.quota import Charge, Quota, Subject
from loraplex.quotas.redis_meter import RedisMeter
from loraplex_engine.errors import EngineError
from loraplex_engine.wire.stream import parse_address
from loraplex_registry.errors import RegistryError
from loraplex_registry.wire.adapter import AdapterName, BaseName, NamesDelta, VersionName
from loraplex_registry.wire.adapter import Target as AliasTarget
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.setting import read_settings

_BODIES: tuple[type, ...] = (
    tenants.TenantCreate,
    tenants.TenantPatch,
    keys.KeyCreate,
    keys.KeyPatch,
    keys.KeyRotate,
    escalations.EscalationOpen,
    escalations.EscalationApprove,
    escalations.EscalationReject,
    escalations.EscalationRegister,
    escalations.EscalationActivate,
    escalations.EscalationExtend,
    escalations.EscalationReason,
    PlanSpec,
)


_BY = Identity(role="admin", tenant_id=None, tenant=None, scopes=(), key_id="k", actor="a", request_id="r")

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/tokenize")


def fuzz_edge(data: bytes) -> None:
    """The values of headers that the gateway reads itself: one a line."""
    lines = [line.decode("latin-1") for line in data.split(b"\n")]
    _find_client_id([(b"x-request-id", lines[0].encode("latin-1"))])
    assert _is_private(b"X-Loraplex-Tenant-Id")
    for line in lines:
        with contextlib.suppress(LoraplexError):
            assert 0 < read_timeout(line) <= 3600
        with contextlib.suppress(LoraplexError):
            read_canary_key(line)
        with contextlib.suppress(LoraplexError):
            parse_time(line, "from")


class _Directory:
    """No key and no tenant."""

    def find_key(self, lookup: str) -> None:
        assert len(lookup) < 64

    def find_tenant(self, name: str) -> None:
        return None


def fuzz_api_key(data: bytes) -> None:
    """The header Authorization: nothing opens where no key is."""
    directory: Any = _Directory()
    Authenticator(directory, b"pepper").authenticate(data.decode("latin-1"), "req")
    raise AssertionError("somebody came in")


@functools.cache
def _names() -> NameIndex:
    versions = tuple(VersionName(number, "sha256:" + "ab" * 32, "ready", "tiny", "lora", 2) for number in (1, 2))
    adapter = AdapterName(
        adapter_id="i", tenant_id="id-team-x", tenant="team-x", name="bot", base="tiny", is_default=True, deleted=False,
        versions=versions, aliases={"live": (AliasTarget(1, 60), AliasTarget(2, 40))}, alias_ids={"live": "l"},
    )  # fmt: skip
    base = BaseName(
        name="tiny", accepted_names=(), fingerprint="f", weights_digest="w", max_lora_rank=8, default_context=9
    )

    async def fetch(_: int) -> NamesDelta:
        return NamesDelta(epoch=1, adapters=(adapter,), bases=(base,))

    index = NameIndex(fetch, lambda: 1, lambda name: f"id-{name}")
    run_async(index.ensure_fresh())
    return index


def fuzz_model_name(data: bytes) -> None:
    """What stands behind `model=`, for a caller of another team: the base, or nothing."""
    model, _, key = data.decode("utf-8", "replace").partition("\0")
    for tenant in ("team-y", "team-x"):
        try:
            found = resolve(model, Caller(tenant, None), _names(), key)
        except LoraplexError as error:
            describe(error).encode()
        else:
            assert found.full_name in ("tiny", "team-x/bot@1", "team-x/bot@2")
            assert tenant == "team-x" or found.adapter is None


def fuzz_inference_body(data: bytes) -> None:
    """The first byte says the route; what the gateway takes it sends on as what it was."""
    call = parse_call(_ROUTES[data[0] % 3] if data else _ROUTES[0], data[1:])
    sent = msgspec.json.decode(call.encode_for("engine-model").decode("utf-8", "surrogatepass"))
    assert sent["model"] == "engine-model"
    find_prefix(call.fields, "tenant")
    estimate_tokens(call.fields)


def fuzz_management_body(data: bytes) -> None:
    """The first byte says whose body the rest is."""
    kind = _BODIES[data[0] % len(_BODIES)] if data else _BODIES[0]
    body: Any = run_async(read_body(build_request(body=data[1:]), kind))
    if isinstance(body, keys.KeyCreate):
        keys._read_new(body, _BY)
    elif isinstance(body, escalations.EscalationOpen):
        escalations._read_opening(body)
    elif isinstance(body, escalations.EscalationApprove):
        escalations.read_approval(body)
    elif isinstance(body, PlanSpec):
        msgspec.json.encode(build_plan(body))


def fuzz_gateway_query(data: bytes) -> None:
    """The queries of lists: pages, times, filters, cursors."""
    directory: Any = _Directory()
    request = split_request(data, ())
    known = {"tenant", "actor", "action", "from", "to", "subject"}
    given = dict(request.query_params.items())
    reads = (
        lambda: read_page(request, {"state", "tenant"}),
        lambda: read_event_query(read_page(request, known)[1], _BY, directory),
        lambda: usage._read_row_query(given, _BY, directory),
        lambda: usage._read_usage_query(given, _BY, directory),
        lambda: read_mark(given.get("cursor", ""), usage._Cursor),
    )
    try_each(reads, (LoraplexError,))


def fuzz_door(data: bytes) -> None:
    """Host, Origin and Cookie of a browser, and where it wants to go after its login."""
    host, origin, cookie, wanted = ([*data.decode("latin-1").split("\n"), "", "", "", ""])[:4]
    read_cookie(host, "http", cookie)
    assert ("Secure" in build_cookie(host, "http", "t", 1)) is not is_loopback(host)
    target = _check_next(wanted)
    assert target.startswith("/ui/")
    assert "\\" not in target
    assert not target.startswith("/ui//")
    check_origin(origin, host)
    assert origin.lower().rpartition("//")[2].startswith(host.lower())


def fuzz_client_answer(data: bytes) -> None:
    """What a server answers to the command line."""
    str(read_error(500, data)).encode()
    decode(data, NamesDelta)


class _Redis:
    """Says what it is told to."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def register_script(self, _: str) -> Any:
        async def run(**__: Any) -> Any:
            return self._answer

        return run

    async def hmget(self, *_: Any) -> Any:
        return self._answer

    async def delete(self, *_: Any) -> Any:
        return self._answer

    def pipeline(self, **_: Any) -> Any:
        return self

    def execute_command(self, *_: Any) -> None:
        pass

    async def execute(self) -> Any:
        return self._answer


def fuzz_redis(data: bytes) -> None:
    """Answers of a Redis server that is another, or was written into by others: JSON stands for them here."""
    try:
        answer = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    run_async(_ask_redis(answer))


async def _ask_redis(answer: Any) -> None:
    quota = Quota(Subject("tenant", "t"), "requests_per_minute", 5)
    meter = RedisMeter("redis://127.0.0.1:1", "x")
    redis: Any = _Redis(answer)
    meter._redis = redis
    meter._scripts = dict.fromkeys(meter._scripts, redis.register_script(""))
    bus = RedisBus("redis://127.0.0.1:1", "x")
    bus._redis, bus._num_connects_seen = redis, bus._num_connects
    asks: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: meter.reserve([Charge(quota, 1)], "lease"),
        lambda: meter.beat("g", 1),
        lambda: meter.tell("b", "m", {}),
        lambda: meter.renew([(quota, "l")]),
        lambda: meter.seed(quota, 1),
        bus.read,
        lambda: RedisTries(redis, "n", "k").find(("a", "b"), 5),
    )
    for ask in asks:
        with contextlib.suppress(MeterError, BusError):
            await ask()


def fuzz_dns(data: bytes) -> None:
    """Addresses as a resolver gives them: each becomes the URL of that host, on the port that was configured."""
    addresses = [line for line in data.decode("utf-8", "replace").split("\n") if line]

    async def resolve_name(host: str, port: int) -> list[str]:
        return addresses

    for url in run_async(Discovery(resolve_name).find_urls(["dns+http://engines:8100"])):
        address = parse_address(url)
        assert (address.port, address.path) == (8100, ""), url


def fuzz_pools(data: bytes) -> None:
    """LORAPLEX_POOLS."""
    for pool in parse_pools(data.decode("utf-8", "replace")):
        for url in pool.engines:
            parse_address(url.removeprefix("dns+"))


def fuzz_settings(data: bytes) -> None:
    """An environment: NAME=VALUE, one a line, for each part."""
    lines = [line.partition("=") for line in data.decode("utf-8", "replace").split("\n")]
    environ = {f"LORAPLEX_{name[:60]}": value for name, _, value in lines[:4] if not name.endswith("_FILE")}
    for part in ("gateway", "registry", "engine", "up"):
        read_settings(environ, part)


def fuzz_trace(data: bytes) -> None:
    """A benchmark's trace."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        rows = read_trace(Path(file.name))
    assert all(row.timestamp >= 0 for row in rows)


def fuzz_plan_config(data: bytes) -> None:
    """A `config.json` that somebody plans with."""
    try:
        config = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if isinstance(config, dict):
        read_shape(config)
        msgspec.json.encode(build_plan(convert({"model": "m", "config": config, "gpu": "80GiB"}, PlanSpec)))


def fuzz_backup(data: bytes) -> None:
    """`backup.json` of an archive; a seal is no obstacle, as whoever writes one can seal it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, MANIFEST)
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            data = encode_manifest(seal(msgspec.json.decode(data, type=BackupManifest)))
        place.write_bytes(data)
        manifest = read_manifest(Path(folder))
    for file in manifest.files:
        assert posixpath.normpath(file.path) == file.path
        assert not file.path.startswith(("/", ".."))


_CONFIG = b"""{"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
"head_dim": 8}"""

_MANIFEST = b"""{"format": 1, "made_by": "0", "made_at": "2026", "revision": "r", "files": [{"path": "loraplex.db",
"size": 1, "sha256": "a"}, {"path": "secrets/admin.key", "size": 1, "sha256": "a"}], "bases": [], "num_artifacts": 0}"""

_OPENING = {
    "adapter": "bot",
    "evidence": {
        "evaluation": "e",
        "metric": "m",
        "base": 1,
        "lora": 2,
        "target": 3,
        "ranks_tried": [{"rank": 8, "value": 2}],
        "data_digest": "sha256:" + "a" * 64,
    },
}

_APPROVAL = {
    "owner": "o",
    "justification": "j",
    "budget_per_month": 5,
    "currency": "EUR",
    "review_at": "2999-01-01T00:00:00Z",
}

GATEWAY_TARGETS = (
    Target(
        "headers",
        fuzz_edge,
        (b"abc\n30\nkey\n2026-12-31", b"1e3\ninf\n2026-01-01T00:00:00+02:00"),
        words=(b"inf", b"nan", b"_", b"+00:00", b"0001-01-01"),
    ),
    Target(
        "api_key",
        fuzz_api_key,
        (b"Bearer lpx_" + b"A" * 10 + b"_" + b"B" * 49, b"bearer x"),
        (LoraplexError,),
        words=(b"lpx_", b"Bearer "),
    ),
    Target(
        "model_name",
        fuzz_model_name,
        (b"team-x/bot@live\0key", b"team-x/bot@sha256:abababababab", b"tiny", b"team-x/bot@1"),
        words=(b"@", b"/", b"sha256:", b"live"),
    ),
    Target(
        "inference_body",
        fuzz_inference_body,
        (
            b'\x00{"model": "m", "messages": [{"role": "user"}], "metadata": {"a": "b"}, "stream": true}',
            b'\x01{"model": "m", "prompt": [1, 2], "max_tokens": 5, "n": 2, "prompt_cache_key": "k"}',
            b'\x02{"model": "m", "prompt": "a"}',
        ),
        (LoraplexError, EngineError),
        words=JSON_WORDS,
    ),
    Target(
        "management_body",
        fuzz_management_body,
        (
            b'\x00{"name": "team-x", "limits": {"requests_per_minute": 5}, "bases": ["tiny"], "weight": 2}',
            b'\x01{"limits": null, "state": "suspended"}',
            b'\x02{"name": "app", "scopes": ["infer"], "expires_at": "2999-01-01T00:00:00Z", "priority": 1}',
            b'\x04{"overlap_s": 60}',
            b"\x05" + json.dumps(_OPENING).encode(),
            b"\x06" + json.dumps(_APPROVAL).encode(),
            b'\x0c{"model": "llama-3.1-8b", "gpu": "24GiB", "adapters": [{"count": 40, "rank": 16}]}',
        ),
        (LoraplexError, EngineError),
        words=JSON_WORDS,
    ),
    Target(
        "gateway_query",
        fuzz_gateway_query,
        (
            b"limit=5&cursor=AZ8&state=open",
            b"from=2026-01-01&to=2026-02-01T00:00:00Z&group_by=day,key&actor=a",
            b"outcome=ok&tenant=t",
        ),
        (LoraplexError,),
        words=(b"&", b"=", b"%00", b"%ff", b"cursor=", b"+"),
    ),
    Target(
        "dashboard_door",
        fuzz_door,
        (
            b"gateway:8080\nhttps://gateway:8080\n__Host-loraplex=t; a=b\n/ui/audit?a=b",
            b"[::1]:1\nhttp://[::1]:1\nloraplex=x\n/ui/",
        ),
        (LoraplexError,),
        words=(b"[", b"]", b"://", b"@", b"//", b"\\", b"localhost"),
    ),
    Target(
        "client_answer",
        fuzz_client_answer,
        (b'{"error": {"message": "m", "code": "c", "param": null}}', b'{"epoch": 1, "adapters": [], "bases": []}'),
        (ClientError,),
        words=JSON_WORDS,
    ),
    Target(
        "redis_answer",
        fuzz_redis,
        (b"[0, 1000, [[5, 1, 2, 3]]]", b"[1, 1000, 0, 5, [[1, 2, 3, 4]]]", b'["1", "2"]', b"[3, 1]", b'[2, "b", 5]'),
        (MeterError, BusError),
        words=JSON_WORDS,
    ),
    Target(
        "dns_answer",
        fuzz_dns,
        (b"10.0.0.1\n10.0.0.2", b"fd00::1", b"fe80::1%eth0"),
        words=(b":", b"]", b"[", b"/", b"@", b"%"),
    ),
    Target(
        "pools",
        fuzz_pools,
        (b'{"main": {"base": "tiny", "engines": ["http://e:8100", "dns+http://n:1"], "pin": ["a", {"model": "b"}]}}',),
        (LoraplexError,),
        words=(*JSON_WORDS, b"http://", b"[::1]:99999"),
    ),
    Target(
        "settings",
        fuzz_settings,
        (b"DATABASE_URL=sqlite+aiosqlite:///x\nLISTEN=127.0.0.1:1\nDRAIN_S=5", b"ENGINE_MAX_LORAS=8\nPOOLS={}"),
        (LoraplexError, RegistryError),
        words=(b"=", b"\n", b"_SERVICE_HOST", b"_PORT"),
    ),
    Target(
        "bench_trace",
        fuzz_trace,
        (b'{"timestamp": 1, "prompt_tokens": 5, "max_tokens": 1}\n{"timestamp": 0.5, "prompt": "a", "max_tokens": 2}',),
        (BenchError,),
        words=JSON_WORDS,
    ),
    Target("plan_config", fuzz_plan_config, (_CONFIG,), (LoraplexError,), words=JSON_WORDS),
    Target(
        "backup_manifest",
        fuzz_backup,
        (_MANIFEST,),
        (BackupError,),
        words=(*JSON_WORDS, b"objects/sha256/", b"../", b"bases/a/b"),
    ),
)
