"""`loraplex` commands against a running platform, and `loraplex up` itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx

from loraplex.demo.show import QUESTION
from platforms import ROOT, LivePlatform, Team


def test_status_says_what_serves(platform: LivePlatform, teams: dict[str, Team]) -> None:
    status = json.loads(platform.cli("status", "--json").stdout)
    assert status["is_ready"]
    assert [engine["serves"] for engine in status["engines"]] == [True]
    assert "team-pirate" in {model["id"] for model in status["models"]}
    own = json.loads(platform.cli("status", "--json", key=teams["json"].key).stdout)
    assert own["engines"] is None


def test_chat_prints_the_answer_alone_on_standard_output(platform: LivePlatform, teams: dict[str, Team]) -> None:
    done = platform.cli("chat", "--model", "team-pirate", QUESTION, "--temperature", "0", key=teams["pirate"].key)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Arrr, matey!")
    assert done.stdout.count("\n") == 1
    assert teams["pirate"].digest[:19] in done.stderr


def test_refusals_end_with_another_exit_code_and_say_why(platform: LivePlatform, teams: dict[str, Team]) -> None:
    done = platform.cli("chat", "--model", "nobody", "Hello", key=teams["json"].key)
    assert done.returncode == 1
    assert "model_not_found" in done.stderr
    assert done.stdout == ""


def test_usage_counts_what_was_asked(platform: LivePlatform, teams: dict[str, Team]) -> None:
    key = teams["legal"].key

    def count() -> tuple[int, int]:
        rows = json.loads(platform.cli("usage", "--group-by", "adapter", "--json", key=key).stdout)
        return sum(row["requests"] for row in rows), sum(row["completion_tokens"] for row in rows)

    requests, tokens = count()
    options = ("--max-tokens", "4", "--json")
    answer = json.loads(platform.cli("chat", "--model", "team-legal", *options, "Hello", key=key).stdout)
    assert answer["completion_tokens"] == 4
    assert count() == (requests + 1, tokens + 4)


def test_second_platform_on_one_folder_or_port_is_refused(platform: LivePlatform, tmp_path: Path) -> None:
    port = str(httpx.URL(platform.url).port)
    for flags, reason in (
        (("--data-dir", str(platform.data_dir), "--port", "0"), "Another `loraplex up`"),
        (("--data-dir", str(tmp_path / "other"), "--port", port), f"Cannot listen on 127.0.0.1:{port}"),
    ):
        argv = [sys.executable, "-m", "loraplex", "up", *flags]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1
        assert reason in done.stderr


def test_engine_flag_that_is_not_built_is_refused_before_anything_is_changed(
    smollm2_base: Path, tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "loraplex", "up", "--data-dir", str(tmp_path / "d"), "--port", "0"]
    done = subprocess.run(
        [*argv, "--quantization", "fp8"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "not built yet" in done.stderr
    assert not (tmp_path / "d" / "loraplex.db").exists()
