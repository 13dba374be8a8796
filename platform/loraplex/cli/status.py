"""`loraplex status`: whether the platform answers, its engines, how they do, and what this key may call there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

import httpx

from loraplex.cli.output import SHORT_DIGEST, AsJson, print_facts, print_json, print_table, stdout
from loraplex.cli.stats_table import print_stats
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.client.location import find_location
from loraplex.client.management import LOST_REDIS, Management
from loraplex.client.types import EngineState, FailedLoad, FleetDifference, FleetReport, Model, Replica
from loraplex.wire.stats import Stats


@dataclass
class Status:
    """What was found out; `engines` is None where this key may not see them, and then `is_ready` is the gateway's."""

    url: str
    is_ready: bool
    has_key: bool
    engines: list[Replica] | None = None
    differences: list[FleetDifference] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    stats: Stats | None = None
    has_lost_redis: bool = False


def status(*, window: Literal["1m", "10m", "1h"] = "10m", as_json: AsJson = False) -> int:
    """Say whether the platform is ready, how it does, and which models this key may call.

    The exit code is 1 if it is not ready.

    Args:
        window: How far back the numbers go.
        as_json: Print JSON for programs.
    """
    location = find_location(os.environ)
    with Connection(location) as connection:
        found = Status(location.url, _is_ready(connection), location.key is not None)
        if found.is_ready and found.has_key:
            client = Management(connection)
            found.has_lost_redis = client.has_lost_redis()
            fleet, found.models, found.stats = _find_fleet(client), _find_models(client), _find_stats(client, window)
            if fleet is not None:
                found.engines, found.differences = fleet.data, fleet.differences
            found.is_ready = found.engines is None or any(engine.serves for engine in found.engines)
    if as_json:
        print_json(found)
    else:
        _print(found)
    return 0 if found.is_ready else 1


def _is_ready(connection: Connection) -> bool:
    try:
        connection.send("GET", "/readyz")
    except ClientError as error:
        if error.status != httpx.codes.SERVICE_UNAVAILABLE:
            raise
        return False
    return True


def _find_fleet(client: Management) -> FleetReport | None:
    try:
        return client.show_fleet()
    except ClientError as error:
        if error.status != httpx.codes.FORBIDDEN:
            raise
        return None


def _find_models(client: Management) -> list[Model]:
    """A key that looks and calls nothing, as one of a read-only administrator, sees the rest."""
    try:
        return client.list_models()
    except ClientError as error:
        if error.status != httpx.codes.FORBIDDEN:
            raise
        return []


def _find_stats(client: Management, window: str) -> Stats | None:
    """A key that may read no usage sees the rest, and so does who asks a gateway that has no such numbers yet."""
    try:
        return client.read_stats(window)
    except ClientError as error:
        if error.status not in (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND):
            raise
        return None


def _print(found: Status) -> None:
    head = {"url": found.url, "ready": found.is_ready, "key": "known" if found.has_key else "none"}
    print_facts(head | ({"redis": LOST_REDIS} if found.has_lost_redis else {}))
    if found.engines is not None:
        print_table(
            "\nEngines",
            ("engine", "base", "serves", "problem"),
            ((engine.url, engine.base or engine.model, engine.serves, engine.problem) for engine in found.engines),
            empty="No engines: set LORAPLEX_POOLS, or use loraplex up.",
        )
        for engine in found.engines:
            if facts := describe_engine(engine):
                stdout().print(f"{engine.url} runs {facts}", markup=False, soft_wrap=True)
        _print_refused(found.engines)
        _print_differences(found.differences)
    if found.stats is not None:
        print_stats(found.stats)
    print_table(
        "\nModels",
        ("model", "version", "base", "of"),
        ((model.id, model.root, model.parent, model.owned_by) for model in found.models),
        empty="No models to show: this needs a key that may call some.",
    )


def _print_refused(engines: list[Replica]) -> None:
    rows = [(engine.url, *row) for engine in engines for row in list_refused(engine.state)]
    if rows:
        print_table("\nAdapters that engines refuse", ("engine", "digest", "state", "because"), rows, empty="")


def _print_differences(differences: list[FleetDifference]) -> None:
    rows = [(one.subject, one.desired, one.actual, one.since, _describe_end(one)) for one in differences]
    if rows:
        print_table("\nNot as it should be", ("what", "should be", "is", "since", "ended by"), rows, empty="")


def _describe_end(difference: FleetDifference) -> str:
    if difference.is_repaired_by != "platform":
        return "you"
    if difference.problem is None:
        return "the platform"
    return f"the platform, {difference.attempts} tries failed: {difference.problem}"


def list_refused(state: EngineState) -> list[tuple[str, str, str]]:
    """Return what an engine could not load or has quarantined for itself: beginning of the digest, state, cause."""
    failed = [(digest[:SHORT_DIGEST], _describe_failure(load), load.reason) for digest, load in state.failed.items()]
    return failed + [
        (digest[:SHORT_DIGEST], f"quarantined here after {found.strikes} strikes", found.reason)
        for digest, found in state.quarantined.items()
    ]


def _describe_failure(load: FailedLoad) -> str:
    tries = f"not loaded, {load.attempts} {'try' if load.attempts == 1 else 'tries'}"
    if load.is_final:
        return f"{tries}, given up"
    return f"{tries}, again in {load.retry_in_s or 0:.0f} s"


def describe_engine(engine: Replica) -> str:
    """Return in one line how an engine runs its base, empty where it did not say."""
    model = engine.state.model
    if model is None:
        return ""
    cache = model.num_blocks * model.block_size
    alone = f", answers {'do not' if model.row_invariant else 'MAY'} depend on what shares the batch"
    return (
        f"{model.dtype}, context {model.max_model_len}, {model.max_loras} adapter slots up to rank "
        f"{model.max_lora_rank}, KV for {cache} tokens, {model.ops or 'unknown'} ops"
        f"{'' if model.row_invariant is None else alone}"
    )
