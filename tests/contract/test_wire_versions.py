"""Gateways, registries and engines of releases N and N+1 beside each other, by messages that were recorded.

`recorded/protocol-N.json` is what a release that speaks N says; it never changes. What this release makes of it is what
a newer part makes of an older one. That this release still says all of it is what an older part needs of a newer one.
Names are not among the messages: a gateway holds its registry in its own process, so both are of one release.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplex.fleet.view import read_full_replica, read_replica
from loraplex_engine.server.app import LoadOptions
from loraplex_engine.wire.done import RequestDone, RequestStatus, UsageReport, decode_done
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.wire import protocol
from loraplex_registry.wire.adapter import Manifest
from loraplex_registry.wire.client import ArtifactClient, ArtifactError
from loraplex_registry.wire.identity import TokenSigner, TokenVerifier, generate_signing_key

RECORDED = Path(__file__).with_name("recorded")
TYPES: dict[str, Any] = {
    "request_done": RequestDone,
    "usage_report": UsageReport,
    "request_status": RequestStatus,
    "parity_result": ParityResult,
    "artifact_manifest": Manifest,
    "load_options": LoadOptions,
}
KEPT = [int(path.stem.partition("-")[2]) for path in sorted(RECORDED.glob("protocol-*.json"))]


def read_recorded(number: int) -> dict[str, Any]:
    """What a release that speaks protocol `number` says."""
    said: dict[str, Any] = json.loads((RECORDED / f"protocol-{number}.json").read_text(encoding="utf-8"))
    return said


def add_future(value: Any, name: str = "") -> Any:
    """The same message as a newer release might say it: each object has a field that nobody knows yet."""
    if isinstance(value, list):
        return [add_future(each) for each in value]
    if isinstance(value, dict):
        # what is kept as it came, and maps by digest, have no fields
        is_map = name == "config" or any(key.startswith("sha256:") for key in value)
        more = {} if is_map else {"future": {"of": ["a newer release"]}}
        return {key: add_future(each, key) for key, each in value.items()} | more
    return value


@pytest.fixture(params=KEPT)
def said(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_recorded(request.param)


def test_every_protocol_that_is_still_spoken_is_recorded() -> None:
    assert list(range(protocol.OLDEST, protocol.NEWEST + 1)) == KEPT


@pytest.mark.parametrize("name", TYPES)
def test_what_an_older_part_says_is_understood(said: dict[str, Any], name: str) -> None:
    found = msgspec.convert(said[name], TYPES[name])
    assert _contains(msgspec.to_builtins(found), said[name])


@pytest.mark.parametrize("name", TYPES)
def test_an_older_part_finds_all_that_it_knows(said: dict[str, Any], name: str) -> None:
    """Encoded by this release, the message has every field of the recorded one, with its value."""
    encoded = json.loads(msgspec.json.encode(msgspec.convert(said[name], TYPES[name])))
    assert _contains(encoded, said[name])


@pytest.mark.parametrize("name", TYPES)
def test_what_a_newer_part_says_beside_that_is_passed_over(said: dict[str, Any], name: str) -> None:
    newer = add_future(said[name])
    assert "future" in newer
    assert msgspec.convert(newer, TYPES[name]) == msgspec.convert(said[name], TYPES[name])


def _contains(whole: Any, part: Any) -> bool:
    """Say whether `whole` has every field of `part`, with its value."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and _contains(whole[name], part[name]) for name in part)
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(_contains, whole, part))
    return bool(whole == part)


def test_a_token_of_a_newer_gateway_is_read_and_has_what_an_older_part_needs(said: dict[str, Any]) -> None:
    signer = TokenSigner(generate_signing_key())
    verifier = TokenVerifier([signer.public_pem], "engine")
    identity = verifier._read(said["token_claims"])
    newer = said["token_claims"] | {"region": "north"}
    newer["limits"] = newer["limits"] | {"adapter_joules": 5}
    assert verifier._read(newer) == identity
    claims = json.loads(json.dumps(msgspec.to_builtins(identity)))
    assert _contains(claims | {"jti": claims["request_id"]}, said["token_claims"])
    assert verifier.verify(signer.sign(identity, "engine")) == identity


def _judge(state: dict[str, Any]) -> str | None:
    model = state["model"]
    full = read_full_replica("http://e", "big", model["name"], state, {model["digest"]})
    replica = read_replica("http://e", "pool", "tiny", state, model["fingerprint"])
    assert full.problem == replica.problem
    return replica.problem


def test_an_engine_of_another_release_gets_traffic_if_it_speaks_our_protocol(said: dict[str, Any]) -> None:
    state = said["engine_state"]
    assert _judge(state) is None
    replica = read_replica("http://e", "pool", "tiny", state, "f" * 64)
    newer = read_replica("http://e", "pool", "tiny", add_future(state), "f" * 64)
    assert msgspec.structs.replace(newer, state={}) == msgspec.structs.replace(replica, state={})
    assert (replica.num_waiting, replica.num_running, replica.max_running, replica.max_lora_rank) == (3, 2, 16, 64)
    assert [len(found) for found in (replica.resident, replica.in_memory, replica.loading)] == [1, 1, 1]
    assert [len(found) for found in (replica.failed, replica.quarantined)] == [1, 1]


@pytest.mark.parametrize(
    ("spoken", "problem"),
    [
        (None, None),
        ("1-1", None),
        ("1-2", None),
        ("nonsense", None),
        ("2-3", "it speaks protocol 2-3 and this program 1-1; upgrade this program"),
        ("0-0", "it speaks protocol 0-0 and this program 1-1; upgrade it"),
    ],
)
def test_an_engine_that_speaks_another_protocol_gets_none_and_the_fleet_says_why(
    spoken: str | None, problem: str | None
) -> None:
    assert _judge(read_recorded(1)["engine_state"] | {"protocol": spoken}) == problem


def test_an_engine_takes_no_adapter_from_a_registry_that_speaks_another_protocol() -> None:
    said = read_recorded(1)["artifact_manifest"]

    def answer(spoken: str | None) -> httpx.MockTransport:
        headers = {} if spoken is None else {protocol.HEADER: spoken}
        return httpx.MockTransport(lambda _: httpx.Response(200, json=said, headers=headers))

    for spoken in (None, "1-1", "1-4"):
        client = ArtifactClient("http://registry", "key", transport=answer(spoken))
        assert client.manifest(said["digest"]).digest == said["digest"]
        client.close()
    client = ArtifactClient("http://registry", "key", transport=answer("2-2"))
    with pytest.raises(ArtifactError, match="the registry speaks protocol 2-2"):
        client.manifest(said["digest"])
    client.close()


def test_the_done_event_is_read_whatever_comes_beside_it(said: dict[str, Any]) -> None:
    assert decode_done(json.dumps(add_future(said["request_done"]))).completion_tokens == 5
