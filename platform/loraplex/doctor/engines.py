"""The engines of LORAPLEX_POOLS, asked as a gateway asks them: reachable, trusting, with the right base, in time.

Without pools there is nothing to ask; what a running platform knows of its engines, `platform` says.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from loraplex.doctor.finding import Check, Finding, Verdict, judge_clock, run_checks
from loraplex.doctor.patient import Patient
from loraplex.fleet.discovery import DNS, split_name
from loraplex.fleet.pools import Pool, parse_pools
from loraplex.fleet.view import Replica, read_full_replica, read_replica
from loraplex_registry.wire.identity import LEEWAY_S, Identity, TokenSigner
from loraplex_registry.wire.ids import new_public_id

_ASK_S = 2.0
_SKEW_WARN_S = 2.0
_DIFFERENT_WEIGHTS = "Serve the same files of the base on all engines of a pool: loraplex base pull on each."


@dataclass(frozen=True)
class _Engine:
    url: str
    pool: Pool


@dataclass
class _Seen:
    """What engines said, for the comparison between them."""

    pool_to_weights: dict[str, dict[str, str]] = field(default_factory=dict)

    def note(self, engine: _Engine, weights: str | None) -> None:
        if weights:
            self.pool_to_weights.setdefault(engine.pool.name, {})[engine.url] = weights


def check_engines(patient: Patient) -> Iterator[Finding]:
    """Ask every engine of every pool."""
    text, private = patient.value("LORAPLEX_POOLS"), patient.value("LORAPLEX_SIGNING_KEY")
    pools = parse_pools(text) if text else ()
    if not pools:
        yield Finding("engines", "skip", "LORAPLEX_POOLS names no engine.")
        return
    if private is None:
        yield Finding("engines", "skip", "Engines answer nobody without the gateway's signing key, which is not here.")
        return
    engines: list[_Engine] = []
    for pool in pools:
        for address in pool.engines:
            found, finding = _resolve(pool, address)
            engines += found
            if finding is not None:
                yield finding
    bases, seen = _read_bases(patient), _Seen()
    checks = [_build_check(engine, TokenSigner(private.encode()), bases, seen) for engine in engines]
    yield from run_checks(checks)
    yield from _compare_weights(seen)


def _resolve(pool: Pool, address: str) -> tuple[list[_Engine], Finding | None]:
    if not address.startswith(DNS):
        return [_Engine(address, pool)], None
    host, port, build_url = split_name(address)
    try:
        infos: Sequence[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "Check the name in LORAPLEX_POOLS, and that the headless service has ready pods."
        why = f"{host} has no address: {error.strerror or error}."
        return [], Finding("engines.dns", "fail", why, remedy, pool.name)
    urls = sorted({build_url(info[4][0]) for info in infos})
    found = Finding("engines.dns", "ok", f"{host} is {len(urls)} engines.", subject=pool.name)
    return [_Engine(url, pool) for url in urls], found


def _build_check(engine: _Engine, signer: TokenSigner, bases: Mapping[str, str | None] | None, seen: _Seen) -> Check:
    def find() -> Iterator[Finding]:
        return _ask(engine, signer, bases, seen)

    remedy = "The engine hangs: look at its log, and start it again."
    return Check("engines.reachable", find, 3 * _ASK_S, remedy)


def _ask(
    engine: _Engine, signer: TokenSigner, bases: Mapping[str, str | None] | None, seen: _Seen
) -> Iterator[Finding]:
    subject = f"{engine.pool.name} {engine.url}"
    with httpx.Client(base_url=engine.url, timeout=_ASK_S, trust_env=False) as http:
        try:
            before = time.time()
            alive = http.get("/healthz")
            middle = (before + time.time()) / 2
            token = signer.sign(_build_identity(), "engine")
            answer = http.get("/internal/state", headers={"authorization": f"Bearer {token}"})
        except httpx.TransportError as error:
            remedy = "Start the engine, or correct its address in LORAPLEX_POOLS; check the network policies."
            why = f"Nothing answers at {engine.url}: {type(error).__name__}."
            yield Finding("engines.reachable", "fail", why, remedy, subject)
            return
    yield Finding("engines.reachable", "ok", f"{engine.url} answers.", subject=subject)
    if "date" in alive.headers:
        # the header has whole seconds
        ahead_s = parsedate_to_datetime(alive.headers["date"]).timestamp() + 0.5 - middle
        why = f"tokens are refused from {LEEWAY_S} s on"
        yield judge_clock(
            "engines.clock", ahead_s, whose=f"The clock of {engine.url}", warn_s=_SKEW_WARN_S, fail_s=LEEWAY_S, why=why
        )
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        why = f"{engine.url} does not trust this gateway's signing key {signer.kid}."
        remedy = "Add the public half to the engine's LORAPLEX_VERIFY_KEYS (openssl pkey -in signing.pem -pubout)."
        yield Finding("keys.same", "fail", why, remedy, subject)
        return
    if answer.status_code != httpx.codes.OK:
        why = f"{engine.url} answered {answer.status_code} for its state."
        yield Finding("engines.base", "fail", why, "Is it an engine of Loraplex? Look at its log.", subject)
        return
    yield from _judge_state(engine, answer.json(), bases, seen)


def _judge_state(
    engine: _Engine, state: dict[str, Any], bases: Mapping[str, str | None] | None, seen: _Seen
) -> Iterator[Finding]:
    pool, subject = engine.pool, f"{engine.pool.name} {engine.url}"
    replica = _read(engine, state, bases)
    if replica.problem is None:
        name = pool.model or pool.base
        yield Finding("engines.base", "ok", f"{engine.url} serves {name} as it is registered.", subject=subject)
    elif bases is None and "not registered" in replica.problem:
        yield Finding("engines.base", "skip", f"{engine.url}: without the database nothing says which base is right.")
    else:
        is_passing = replica.problem in ("it is draining", "it is starting")
        remedy = "Wait, and ask again." if is_passing else "Let it serve the pool's base, or move it to another pool."
        verdict: Verdict = "warn" if is_passing else "fail"
        yield Finding("engines.base", verdict, f"{engine.url}: {replica.problem}.", remedy, subject)
    seen.note(engine, replica.weights_digest)
    model = state.get("model")
    if isinstance(model, dict) and model.get("ops") == "torch":
        why = f"{engine.url} runs without compiled ops, several times slower: {model.get('ops_reason', 'no reason')}"
        yield Finding("engines.ops", "warn", why, "Install g++ on the engine's machine, and start it again.", subject)


def _read(engine: _Engine, state: dict[str, Any], bases: Mapping[str, str | None] | None) -> Replica:
    pool = engine.pool
    if pool.model is not None:
        return read_full_replica(engine.url, pool.name, pool.model, state, ())
    return read_replica(engine.url, pool.name, pool.base, state, (bases or {}).get(pool.base))


def _compare_weights(seen: _Seen) -> Iterator[Finding]:
    for pool, url_to_weights in seen.pool_to_weights.items():
        kinds = sorted(set(url_to_weights.values()))
        if len(kinds) == 1:
            yield Finding("engines.weights", "ok", f"All engines of {pool} have the same weights.", subject=pool)
            continue
        shown = "; ".join(f"{url} has {weights[:19]}" for url, weights in sorted(url_to_weights.items()))
        yield Finding("engines.weights", "fail", f"Weights differ in {pool}: {shown}.", _DIFFERENT_WEIGHTS, pool)


def _read_bases(patient: Patient) -> dict[str, str | None] | None:
    """Return the registered fingerprints by base, None where the database cannot be asked."""
    url = patient.value("LORAPLEX_DATABASE_URL")
    if url is None:
        return None
    parsed = sa.make_url(url.replace("sqlite+aiosqlite", "sqlite"))
    is_sqlite = parsed.get_backend_name() == "sqlite"
    if is_sqlite and not Path(parsed.database or "").exists():
        return None
    bound = {"timeout": 2.0} if is_sqlite else {"connect_timeout": 2}
    engine = sa.create_engine(parsed, poolclass=sa.NullPool, connect_args=bound)
    try:
        with engine.connect() as connection:
            return {row.name: row.fingerprint for row in connection.execute(sa.text(_BASES))}
    except sa.exc.DatabaseError:
        # the check of the database says so
        return None
    finally:
        engine.dispose()


_BASES = "SELECT name, fingerprint FROM base"


def _build_identity() -> Identity:
    return Identity(
        role="admin_readonly",
        tenant_id=None,
        tenant=None,
        scopes=(),
        key_id="doctor",
        actor="doctor",
        request_id=new_public_id("req"),
    )
