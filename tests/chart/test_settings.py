"""Settings: what the chart renders exists, the program takes it, and what exists can be set."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chart_values import ENGINE_SETTINGS, GATEWAY_SETTINGS, SCHEMA
from chart_world import Pod, Rendering, env_of
from loraplex.fleet.pools import parse_pools
from loraplex.settings import Settings, check_exposure, load_settings
from loraplex_engine.__main__ import build_parser
from loraplex_engine.flags import build_config
from loraplex_engine.server.process import read_secrets
from loraplex_registry.settings import load_settings as load_registry_settings
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from loraplex_registry.wire.setting import SETTINGS, Setting, read_settings

PART_OF = {
    "gateway": "gateway",
    "registry": "registry",
    "engine": "engine",
    "migration": "up",
    "registration": "client",
    "test": "client",
    "trial": "up",
}
NOT_SET = {
    ("registry", "LORAPLEX_PARITY_GATE"): "always required: it knows no engines and may let nothing through",
    ("gateway", "LORAPLEX_REGISTRY_URL"): "refused: the gateway has the registry in it",
    ("gateway", "LORAPLEX_CACHE_DIR"): "the gateway keeps no cache",
    ("registry", "LORAPLEX_CACHE_DIR"): "the registry keeps no cache",
    ("engine", "LORAPLEX_TEST_HOOKS"): "refused but on loopback",
    ("trial", "LORAPLEX_TEST_HOOKS"): "for tests on one machine",
    **{
        ("trial", f"LORAPLEX_{name}"): "a trial has its own, in its volume"
        for name in (
            "DATABASE_URL",
            "OBJECT_STORE_URL",
            "OBJECT_STORE_PUBLIC_URL",
            "REDIS_URL",
            "POOLS",
            "SIGNING_KEY",
            "ENGINE_KEY",
            "KEY_PEPPER",
        )
    },
}
SIGNER = TokenSigner(generate_signing_key())
SECRETS = {
    "DATABASE_URL": "postgresql+psycopg://loraplex@db/loraplex",
    "REDIS_URL": "redis://redis:6379/0",
    "ADMIN_KEY": "an-admin-key-of-a-good-length",
    "KEY_PEPPER": "pepper",
    "SIGNING_KEY": "",
    "VERIFY_KEYS": SIGNER.public_pem.decode(),
    "ENGINE_KEY": "an-engine-key-of-a-good-length",
    "API_KEY": "an-admin-key-of-a-good-length",
}


def known(part: str) -> dict[str, Setting]:
    """The settings that a part reads and that are built."""
    return {one.name: one for one in SETTINGS if part in one.parts and one.is_built}


def names_of(container: dict[str, Any]) -> set[str]:
    """The settings that a container is given."""
    return {name.removesuffix("_FILE") for name in env_of(container) if name.startswith("LORAPLEX_")}


def environ_of(pod: Pod, folder: Path) -> dict[str, str]:
    """The main container's environment, with secrets in files of ours."""
    environ = env_of(pod.main)
    for name in [name for name in environ if name.startswith("LORAPLEX_") and name.endswith("_FILE")]:
        key = environ[name].rpartition("/")[2]
        (folder / key).write_text(SECRETS[key])
        environ[name] = str(folder / key)
    return environ


def test_every_setting_that_is_rendered_is_one_of_its_part(rendering: Rendering) -> None:
    for pod in rendering.pods:
        for container in pod.containers:
            # the weights' program is the engine's
            part = "engine" if container["name"] == "weights" else PART_OF[pod.component]
            assert names_of(container) <= known(part).keys(), container["name"]


@pytest.mark.parametrize(
    ("component", "case"),
    [("gateway", "everything"), ("registry", "everything"), ("engine", "everything"), ("trial", "trial-settings")],
)
def test_every_setting_of_a_part_can_be_set(render: Callable[[str], Rendering], component: str, case: str) -> None:
    rendered = set().union(*(names_of(pod.main) for pod in render(case).pods_of(component)))
    # the two that size the KV cache exclude each other
    rendered |= {"LORAPLEX_ENGINE_GPU_MEMORY_UTILIZATION"} & known(PART_OF[component]).keys()
    reasons = {name for part, name in NOT_SET if part == component}
    assert known(PART_OF[component]).keys() - rendered - reasons == set()


def test_no_reason_is_given_for_what_is_set(render: Callable[[str], Rendering]) -> None:
    given = {component: known(PART_OF[component]).keys() for component in ("gateway", "registry", "engine", "trial")}
    stale = {(part, name) for (part, name), reason in NOT_SET.items() if reason and name not in given[part]}
    assert stale == set()


def test_the_schema_has_each_setting_as_a_typed_value() -> None:
    """And the sets of values that the tests render are as full as the schema."""
    definitions = SCHEMA["definitions"]
    assert definitions["gatewayConfig"]["properties"].keys() == GATEWAY_SETTINGS.keys()
    assert definitions["engineConfig"]["properties"].keys() == {*ENGINE_SETTINGS, "gpuMemoryUtilization"}
    for config in ("gatewayConfig", "partConfig", "engineConfig"):
        for key, rule in definitions[config]["properties"].items():
            name = re.sub("([A-Z])", r"_\1", key).upper()
            assert rule["description"]
            assert {f"LORAPLEX_{name}", f"LORAPLEX_ENGINE_{name}"} & {one.name for one in SETTINGS}, key


@pytest.mark.parametrize("case", ["production", "everything", "plain"])
def test_the_gateway_takes_what_it_is_given(render: Callable[[str], Rendering], tmp_path: Path, case: str) -> None:
    (pod,) = render(case).pods_of("gateway")
    settings = load_settings(environ_of(pod, tmp_path))
    assert isinstance(settings, Settings)
    assert pod.main["args"][1:] == ["--insecure-behind-proxy"], "which is what lets it listen for others"
    check_exposure(Settings(**{**vars(settings), "insecure_behind_proxy": True}))
    assert settings.port == 8080
    assert settings.has_company == (case != "plain")
    if case == "everything":
        assert (settings.parity_gate, settings.purge_after_days, settings.database_pool_size) == (
            "when_available",
            7,
            9,
        )


def test_pools_are_what_the_gateway_reads(render: Callable[[str], Rendering]) -> None:
    (pod,) = render("everything").pods_of("gateway")
    pools = {pool.name: pool for pool in parse_pools(env_of(pod.main)["LORAPLEX_POOLS"])}
    assert pools["main"].engines == ("dns+http://rel-loraplex-engine-main.prod.svc.cluster.local:8100",)
    assert [(pin.model, pin.copies) for pin in pools["main"].pins] == [("team-x", None), ("team-y/support@canary", 2)]
    assert (pools["full"].model, pools["full"].base) == ("team-x-full-v1", "")
    assert pools["elsewhere"].engines == ("http://10.9.0.1:8100", "dns+http://engines:8100")
    for name in ("main", "small", "full"):
        (engine,) = render("everything").pods_of("engine", name)
        assert env_of(engine.main)["LORAPLEX_ENGINE_SERVED_MODEL_NAME"] in (pools[name].base, pools[name].model)


@pytest.mark.parametrize("case", ["production", "everything"])
def test_the_registry_takes_what_it_is_given(render: Callable[[str], Rendering], tmp_path: Path, case: str) -> None:
    (pod,) = render(case).pods_of("registry")
    settings = load_registry_settings(environ_of(pod, tmp_path))
    assert (settings.port, settings.registry.parity_gate) == (8081, "required")
    (gateway,) = render(case).pods_of("gateway")
    purge = load_settings(environ_of(gateway, tmp_path)).purge_after_days
    assert settings.registry.purge_after_days == purge, "or one would purge what the other keeps"


@pytest.mark.parametrize(
    ("case", "pools"), [("production", ["main"]), ("everything", ["main", "small", "full"]), ("plain", ["main"])]
)
def test_the_engine_takes_what_it_is_given(
    render: Callable[[str], Rendering], tmp_path: Path, case: str, pools: list[str]
) -> None:
    for pool in pools:
        (pod,) = render(case).pods_of("engine", pool)
        settings = read_settings(environ_of(pod, tmp_path), "engine")
        config = build_config(build_parser().parse_args(["serve"]), settings, tmp_path, tmp_path)
        assert read_secrets(settings).engine_key == SECRETS["ENGINE_KEY"]
        assert config.registry_url.endswith(":8080" if case == "plain" else ":8081")
        if case == "everything":
            found = (config.max_queued_requests, config.adapter_cache_bytes, config.adapter_load_timeout_s)
            assert found == (1_000_000, 21_474_836_480, 30.5)
            assert (config.enable_prefix_caching, config.kv_cache_memory_bytes) == (False, 2 << 30)
