"""The core as its front sees it: a process, two sockets, adapters from a registry over HTTP."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core_world import ArtifactServer, Core, share_native
from loraplex_engine.bases.folder import load_spec
from loraplex_engine.bases.pull import pull
from loraplex_engine.config import EngineConfig
from loraplex_engine.wire import messages as wire
from loraplex_registry.peft.check import check_adapter
from support import write_adapter


@pytest.fixture(scope="module")
def registry() -> Iterator[ArtifactServer]:
    server = ArtifactServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def base(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pull(str(tiny_llama), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def core(base: Path, registry: ArtifactServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    folder = tmp_path_factory.mktemp("core")
    config = EngineConfig(
        base=str(base),
        cache_dir=share_native(folder / "cache"),
        registry_url=registry.url,
        dtype="float32",
        max_loras=2,
    )
    core = Core(config, folder)
    ready = core.wait_ready()
    assert isinstance(ready, wire.CoreReady), ready
    yield core
    core.close()


@pytest.fixture
def put(base: Path, registry: ArtifactServer, tmp_path: Path) -> Any:
    def put_adapter(seed: int) -> str:
        folder = write_adapter(tmp_path / f"adapter{seed}", base, seed=seed)
        _, plan = check_adapter({file.name: file for file in folder.iterdir()}, load_spec(base))
        assert plan is not None
        registry.folders[plan.digest] = folder
        return plan.digest

    return put_adapter


def add(core: Core, request_id: str, digest: str | None = None, max_tokens: int = 4) -> None:
    params = wire.SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    core.send(wire.AddRequest(request_id, [5, 6, 7, 8], params, digest))


def tokens(events: list[wire.TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_base_and_new_adapters_answer_in_one_batch_and_differ(core: Core, put: Any) -> None:
    digests = [None, put(1), put(2), put(3)]
    for index, digest in enumerate(digests):
        add(core, f"mix{index}", digest, 8)
    events = core.collect(*(f"mix{index}" for index in range(4)))
    answers = [tuple(tokens(events[f"mix{index}"])) for index in range(4)]
    assert len(set(answers)) == 4
    assert all(len(answer) == 8 for answer in answers)
    state = core.call(wire.GetState).body
    assert isinstance(state, dict)
    assert state["kv"]["num_free"] == state["kv"]["num_blocks"]
    assert [slot["pins"] for slot in state["slots"]] == [0, 0]


def test_metrics_are_prometheus_text_with_the_contracted_names(core: Core) -> None:
    body = core.call(wire.GetMetrics).body
    assert isinstance(body, bytes)
    for name in ("loraplex_kv_cache_usage_ratio", "loraplex_step_adapters_bucket", "loraplex_base_gemm_calls_total"):
        assert name.encode() in body


def test_unknown_digest_fails_its_request_alone(core: Core) -> None:
    add(core, "unknown", f"sha256:{'0' * 64}")
    add(core, "fine")
    events = core.collect("unknown", "fine")
    error = events["unknown"][-1].error
    assert error is not None
    assert (error.code, error.retry_after_s) == ("adapter_loading", 2)
    assert len(tokens(events["fine"])) == 4


def test_registry_that_was_down_is_tried_again(core: Core, put: Any, registry: ArtifactServer) -> None:
    digest = put(20)
    registry.is_down = True
    add(core, "down", digest)
    assert core.collect("down")["down"][-1].error is not None
    registry.is_down = False
    time.sleep(1.1)
    add(core, "up", digest)
    assert len(tokens(core.collect("up")["up"])) == 4


def test_slow_download_holds_up_no_other_adapter(core: Core, put: Any, registry: ArtifactServer) -> None:
    slow, fast = put(21), put(22)
    registry.stalled = slow
    add(core, "slow", slow)
    add(core, "fast", fast)
    assert len(tokens(core.collect("fast")["fast"])) == 4
    registry.resume.set()
    assert len(tokens(core.collect("slow")["slow"])) == 4


def test_abort_ends_a_request_and_says_what_it_cost(core: Core) -> None:
    add(core, "long", max_tokens=400)
    first = core.receive()
    assert isinstance(first, wire.TokenEvents)
    core.send(wire.AbortRequest("long"))
    last = core.collect("long")["long"][-1]
    assert last.finish == "abort"
    assert last.stats is not None
    assert 1 <= last.stats.completion_tokens < 400


def test_warm_and_drop_answer_when_done(core: Core, put: Any) -> None:
    digest = put(30)
    reply = core.call(wire.LoadAdapter, digest=digest, pin=True)
    assert reply.error is None
    state = core.call(wire.GetState).body
    assert isinstance(state, dict)
    assert {"digest": digest, "keep": True} in [{k: slot[k] for k in ("digest", "keep")} for slot in state["slots"]]
    assert core.call(wire.DropAdapter, digest=digest).error is None
    state = core.call(wire.GetState).body
    assert isinstance(state, dict)
    assert digest not in [slot["digest"] for slot in state["slots"]] + state["host"]


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def test_killed_loader_is_replaced(core: Core, put: Any) -> None:
    (loader,) = _children(core.process.pid)
    os.kill(loader, signal.SIGKILL)
    digest = put(40)
    deadline = time.monotonic() + 60
    answered = False
    while not answered and time.monotonic() < deadline:
        name = f"after-kill-{time.monotonic()}"
        add(core, name, digest)
        answered = core.collect(name)[name][-1].error is None
        time.sleep(0.2)
    assert answered


def test_core_that_cannot_start_says_why(base: Path, tmp_path: Path) -> None:
    config = EngineConfig(base=str(base), cache_dir=str(tmp_path), kv_cache_memory_bytes=10, dtype="float32")
    core = Core(config, tmp_path)
    failed = core.wait_ready()
    assert isinstance(failed, wire.CoreFailed)
    assert "--kv-cache-memory-bytes" in failed.message
    assert core.process.wait(60) == 3
    core.close()
