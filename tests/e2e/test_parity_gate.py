"""The parity gate with a real engine: what is served as its files say becomes ready, what is not is quarantined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.client.upload import list_files
from loraplex_engine.bases.pull import pull
from platforms import EXAMPLES, running_platform
from support import tiny_llama_config, write_adapter, write_base


@pytest.mark.endure
def test_an_engine_measures_before_anybody_may_call(
    request: pytest.FixtureRequest, tmp_path: Path, long: Callable[[float, float], float]
) -> None:
    if long(0, 1):
        base, folder = request.getfixturevalue("smollm2_base"), EXAMPLES / "pirate"
    else:
        base = pull(str(write_base(tmp_path / "tiny", tiny_llama_config())), tmp_path / "bases")
        folder = write_adapter(tmp_path / "adapter", base, rank=4)
    env = {"LORAPLEX_PARITY_GATE": "required", "LORAPLEX_TEST_HOOKS": "1"}
    flags = ("--base", str(base), "--dtype", "float32", "--max-model-len", "256")
    with running_platform(tmp_path / "data", *flags, env=env) as platform, platform.management() as client:
        for team in ("team-good", "team-spoiled"):
            client.create_tenant(team)
        files = list_files(folder)
        good = client.push("team-good", "default", files, lambda _: None, wait=300)
        assert (good.state, good.promoted) == ("ready", True)
        found = good.report.parity
        assert found
        assert 0 < found.max_logit_difference <= found.logit_limit <= 1e-2
        assert found.effect_rms > 100 * found.rms_difference, "the adapter does something, and that is what is right"
        # the same content, while other numbers lie where the engine holds it
        platform.ask_engine("/internal/test/spoil", {"digest": good.digest})
        spoiled = client.push("team-spoiled", "default", files, lambda _: None, wait=300)
        assert (spoiled.state, spoiled.promoted, spoiled.digest) == ("quarantined", False, good.digest)
        assert spoiled.quarantine is not None
        assert (spoiled.quarantine.reason, spoiled.report.verdict) == ("parity", "fail")
        found = spoiled.report.parity
        assert found
        assert not found.is_within
