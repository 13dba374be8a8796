"""`python -m loraplex_engine`: what the commands print and refuse."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from loraplex_engine.__main__ import main
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError
from loraplex_engine.flags import add_engine_flags, build_config
from support import tiny_llama_config, write_base


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_base(tmp_path / "tiny", tiny_llama_config())


def test_pull_ends_with_one_line_of_json(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", str(source), "--cache-dir", str(tmp_path / "cache"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["folder"] == str(tmp_path / "cache" / "bases" / "tiny")
    assert output["name"] == "tiny"
    assert output["fingerprint"].startswith("sha256:")
    assert output["digest"].startswith("sha256:")


def test_list_names_the_bases_of_the_cache(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ("--cache-dir", str(tmp_path / "cache"))
    assert main(["list", *cache, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    main(["pull", str(source), *cache])
    capsys.readouterr()
    assert main(["list", *cache, "--json"]) == 0
    (base,) = json.loads(capsys.readouterr().out)
    assert (base["name"], base["from"]) == ("tiny", str(source))
    assert base["folder"] == str(tmp_path / "cache" / "bases" / "tiny")
    assert main(["list", *cache]) == 0
    assert "tiny  context" in capsys.readouterr().out


def test_check_refuses_what_serve_would_and_needs_no_base(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--max-loras", "4"]) == 0
    assert main(["check", "--quantization", "fp8"]) == 1
    assert "--quantization is 'fp8'" in capsys.readouterr().err


def test_pull_fails_with_a_sentence_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "nothing", "--cache-dir", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("loraplex engine: 'nothing' is no folder")


def test_serve_says_how_to_get_a_base_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--base", "nothing", "--cache-dir", str(tmp_path)]) == 1
    assert "loraplex base pull nothing" in capsys.readouterr().err


def test_pull_does_not_import_torch(run_python, source: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    program = (
        "import sys; from loraplex_engine.__main__ import main\n"
        f"main(['pull', {str(source)!r}, '--cache-dir', {str(tmp_path / 'cache')!r}])\n"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    assert run_python(program).splitlines()[-1] == "[]"


def parse(*flags: str, **settings: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry-url")
    add_engine_flags(parser)
    return build_config(parser.parse_args(flags), settings, Path("/base"), Path("/cache"))


def test_a_flag_wins_over_the_environment() -> None:
    assert parse(engine_max_loras="3").max_loras == 3
    assert parse("--max-loras", "5", engine_max_loras="3").max_loras == 5
    assert parse().max_loras == EngineConfig(base="", cache_dir="").max_loras


def test_a_share_of_the_memory_arrives_from_flag_and_environment() -> None:
    assert parse().gpu_memory_utilization is None
    assert parse("--gpu-memory-utilization", "0.5").gpu_memory_utilization == 0.5
    assert parse(engine_gpu_memory_utilization="0.90").gpu_memory_utilization == 0.9


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2147483648", 2 << 30), ("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("4KiB", 4096)],
)
def test_sizes_are_bytes_or_have_a_unit(text: str, num_bytes: int) -> None:
    assert parse("--kv-cache-memory-bytes", text).kv_cache_memory_bytes == num_bytes
    assert parse(engine_kv_cache_memory_bytes=text).kv_cache_memory_bytes == num_bytes
    assert parse("--adapter-cache-bytes", "1TiB").adapter_cache_bytes == 1 << 40


@pytest.mark.parametrize("text", ["2G", "2GB", "2gib", "0.3KiB", "-1", "1.5", "GiB", ""])
@pytest.mark.parametrize("flag", ["--kv-cache-memory-bytes", "--adapter-cache-bytes"])
def test_another_size_is_told_how_to_be_written(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} is '{text}', but must be bytes, .* as in 2GiB\.$"):
        parse(f"{flag}={text}")


def test_durations_and_urls_arrive() -> None:
    config = parse("--adapter-load-timeout", "2.5", "--step-timeout", "9", "--registry-url", "http://127.0.0.1:1/")
    assert (config.adapter_load_timeout_s, config.step_timeout_s) == (2.5, 9)
    assert config.registry_url == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-loras", "many"], "--max-loras"),
        (["--max-loras", "0"], "--max-loras"),
        (["--step-timeout", "0"], "--step-timeout is 0"),
        (["--adapter-load-timeout", "0"], "--adapter-load-timeout is 0"),
        (["--dtype", "int4"], "--dtype"),
        (["--quantization", "awq"], "--quantization"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype"),
        (["--attention-backend", "flash"], "--attention-backend"),
        (["--no-enable-chunked-prefill"], "--enable-chunked-prefill"),
        (["--no-enforce-eager"], "--enforce-eager.*CUDA graphs"),
        (["--device", "cuda"], "--device"),
        (["--gpu-memory-utilization", "0.9", "--kv-cache-memory-bytes", "1000000"], "give one of them"),
    ],
)
def test_what_is_not_built_is_refused_by_flag(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(*flags)


def test_the_one_value_that_there_is_may_be_said() -> None:
    parse("--tensor-parallel-size", "1", "--enable-chunked-prefill", "--kv-cache-dtype", "auto", "--enforce-eager")
