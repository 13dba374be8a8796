"""The share of repeated prefixes from real traffic: exact through gateway and engine."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from loraplex_engine.bases.pull import pull
from platforms import LivePlatform, running_platform, wait_for
from support import tiny_llama_config, write_adapter, write_base

LENGTH, COUNT = 320, 100
PERCENTS = (5, 80)
SWITCH = "--no-enable-prefix-caching"
"""What is measured does not depend on it: the tests of the scheduler have both."""
VOCABULARY = range(10, 90)


def test_share_of_each_team_is_what_was_sent(tmp_path: Path) -> None:
    base = pull(str(write_base(tmp_path / "tiny", tiny_llama_config())), tmp_path / "bases")
    with running_platform(tmp_path / "data", "--base", str(base), "--max-model-len", "512", SWITCH) as platform:
        keys = {percent: join(platform, tmp_path, base, percent) for percent in PERCENTS}
        for percent, key in keys.items():
            send(platform, key, f"team-{percent}", percent)
        wait_for(lambda: platform.engine_state()["prefix_history"]["requests"] == len(PERCENTS) * (COUNT + 1))
        metrics = platform.engine_metrics()
        assert metrics["loraplex_prompt_tokens_total"] == len(PERCENTS) * (COUNT + 1) * LENGTH
        repeated = sum(COUNT * LENGTH * percent // 100 for percent in PERCENTS)
        assert metrics["loraplex_prompt_tokens_repeated_total"] == repeated
        for percent, key in keys.items():
            wait_for(lambda key=key: advise(platform, key)["evidence"].get("requests") == COUNT + 1)  # type: ignore[misc]
            found = advise(platform, key)
            assert found["evidence"]["repeated_share"] == round(COUNT * percent / 100 / (COUNT + 1), 6)
            assert found["evidence"]["is_exact"] == "yes"
        whole = json.loads(platform.cli("advise", "--json").stdout)
        (of_base,) = (one for one in whole if one["rule"] == "prefix_cache")
        share = repeated / (len(PERCENTS) * (COUNT + 1) * LENGTH)
        assert of_base["evidence"]["repeated_share"] == round(share, 6)
        assert of_base["flag"] == "--enable-prefix-caching"


def join(platform: LivePlatform, folder: Path, base: Path, percent: int) -> str:
    """Make a team with an adapter and return its key."""
    name, headers = f"team-{percent}", {"authorization": f"Bearer {platform.admin_key}"}
    source = write_adapter(folder / name, base, rank=2, seed=percent)
    files = [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60) as http:
        http.post("/api/v1/tenants", json={"name": name}).raise_for_status()
        http.post(f"/api/v1/tenants/{name}/adapters/default/versions", files=files).raise_for_status()
        body = {"name": "all", "scopes": ["infer", "usage:read"]}
        return str(http.post(f"/api/v1/tenants/{name}/keys", json=body).raise_for_status().json()["key"])


def send(platform: LivePlatform, key: str, model: str, percent: int) -> None:
    """One prompt, and then `COUNT` that begin with as much of it and go on each in its own way."""
    rng = random.Random(percent)
    prefix = [rng.choice(VOCABULARY) for _ in range(LENGTH * percent // 100)]

    def ask(prompt: list[int]) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        http.post("/v1/completions", json=body, headers=headers).raise_for_status()

    prompts = [[*prefix, *(rng.choice(VOCABULARY) for _ in range(LENGTH - len(prefix)))] for _ in range(COUNT + 1)]
    with httpx.Client(base_url=platform.url, timeout=60) as http:
        ask(prompts[0])
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, prompts[1:]))


def advise(platform: LivePlatform, key: str) -> dict[str, dict[str, object]]:
    """What is said of prefixes."""
    answer = httpx.get(f"{platform.url}/api/v1/advice", headers={"authorization": f"Bearer {key}"}, timeout=30)
    (found,) = (one for one in answer.raise_for_status().json()["data"] if one["rule"] == "prefix_cache")
    return dict(found)
