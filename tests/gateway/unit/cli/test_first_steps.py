"""What a newcomer meets: where the platform is, which commands are printed, which flags are promised."""

from __future__ import annotations

import fcntl
import re
import sys
from pathlib import Path

import pytest

from loraplex.cli.app import main
from loraplex.cli.program import name_program, name_python
from loraplex.cli.up import build_next_lines
from loraplex.client.errors import ClientError, NoKeyError
from loraplex.client.location import Location, default_data_dir, find_location
from loraplex.client.upload import choose_files
from loraplex_engine.config import EngineConfig, check_config
from loraplex_engine.errors import ConfigError
from loraplex_registry.wire.setting import SettingError


def say_why_no_key(environ: dict[str, str]) -> str:
    with pytest.raises(NoKeyError) as caught:
        find_location(environ).require_key()
    return caught.value.message


def test_missing_key_says_what_is_wrong(tmp_path: Path) -> None:
    environ = {"LORAPLEX_DATA_DIR": str(tmp_path)}
    assert "No platform of yours runs here" in say_why_no_key(environ)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "still starting" in say_why_no_key(environ)
    assert "No platform of yours runs here" in say_why_no_key(environ)
    told = environ | {"LORAPLEX_URL": "http://other"}
    assert "no API key for http://other" in say_why_no_key(told)
    (tmp_path / "url").write_text("http://127.0.0.1:9\n")
    assert "is at http://127.0.0.1:9" in say_why_no_key(told)


@pytest.mark.parametrize("name", ["LORAPLEX_API_KEY", "LORAPLEX_URL"])
def test_a_variable_that_is_set_but_empty_does_not_mean_the_local_admin(name: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text("http://127.0.0.1:9\n")
    (tmp_path / "admin.key").write_text("local\n")
    (tmp_path / "key").write_text("http://other\n")
    environ = {"LORAPLEX_DATA_DIR": str(tmp_path)}
    assert find_location(environ).key == "local"
    for empty in ("", " \n"):
        with pytest.raises(SettingError, match=f"{name} is set but empty"):
            find_location(environ | {name: empty})
    assert find_location(environ | {name: "", f"{name}_FILE": str(tmp_path / "key")}) != find_location(environ)


def test_localhost_is_the_local_platform_and_is_called_by_its_own_address(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("http://127.0.0.1:9\n")
    (tmp_path / "admin.key").write_text("local\n")
    environ = {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_URL": "http://localhost:9/"}
    assert find_location(environ) == Location("http://127.0.0.1:9", "local", is_direct=True)
    assert find_location(environ | {"LORAPLEX_URL": "http://localhost:90"}).key is None


def test_url_without_scheme_says_what_to_add() -> None:
    with pytest.raises(ClientError, match="add http://"):
        find_location({"LORAPLEX_URL": "127.0.0.1:8080"})


def test_next_lines_lead_to_the_platform_that_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/bin/nowhere/loraplex"])
    default = default_data_dir({"XDG_DATA_HOME": str(tmp_path)})
    assert build_next_lines(default, "b", has_tenants=False)[0] == "/bin/nowhere/loraplex tenants create team-x"
    assert build_next_lines(default, "b", has_tenants=True)[0] == "/bin/nowhere/loraplex status"
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path / "my data"))
    lines = build_next_lines(tmp_path / "my data", "b", has_tenants=False)
    assert lines[0] == f"export LORAPLEX_DATA_DIR='{tmp_path / 'my data'}'"


def test_program_is_named_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "loraplex"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert name_program() == "bin/loraplex"
    monkeypatch.setenv("PATH", str(program.parent))
    assert name_program() == "loraplex"
    monkeypatch.setattr(sys, "argv", ["/x/loraplex/__main__.py"])
    assert name_program() == f"{name_python()} -m loraplex"


@pytest.mark.parametrize(
    "field",
    ["max_num_seqs", "max_num_batched_tokens", "block_size", "max_loras", "max_lora_rank", "adapter_load_timeout_s"],
)
def test_promised_default_is_the_engines(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    default = f"{getattr(EngineConfig(base='', cache_dir=''), field):.0f}"
    flag = f"--{field.removesuffix('_s').replace('_', '-')}"
    assert main(["up", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert re.search(rf"{flag} (INT|FLOAT) [^-]*default {default}\.", shown)
    page = (Path(__file__).resolve().parents[4] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `{flag}` \|.*\| {default} \|$", page, re.MULTILINE)


def test_flags_whose_zero_is_the_default_are_named() -> None:
    config = EngineConfig(base="", cache_dir="")
    zeros = [
        name for name in config.__struct_fields__ if type(getattr(config, name)) is int and not getattr(config, name)
    ]
    assert all(takes_zero(name) for name in zeros)
    page = (Path(__file__).resolve().parents[4] / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = re.search(r"^0 means the default for ([^.]*)\.", page, re.MULTILINE)
    assert listed
    assert re.findall(r"--([a-z-]+)", listed[1]) == [name.replace("_", "-") for name in zeros]


def takes_zero(name: str) -> bool:
    try:
        check_config(EngineConfig(base="", cache_dir="", **{name: 0}))
    except ConfigError:
        return False
    return True


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_folder_of_something_else_is_refused_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "notes.txt", "optimizer.pt")
    assert main(["adapters", "check", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("adapter_config.json") == 1


def test_weights_that_are_a_pickle_only_are_refused_with_the_command_that_converts_them(tmp_path: Path) -> None:
    fill(tmp_path, "adapter_config.json", "adapter_model.bin")
    with pytest.raises(ClientError, match="save_file"):
        choose_files(tmp_path)
    fill(tmp_path, "adapter_model.safetensors")
    chosen = choose_files(tmp_path)
    assert [path.name for path in chosen.sent] == ["adapter_config.json", "adapter_model.safetensors"]
    assert chosen.left_out == ["adapter_model.bin"]


def test_part_of_the_adapter_itself_is_never_left_out(tmp_path: Path) -> None:
    fill(tmp_path, "adapter_config.json", "adapter_model-00001-of-00002.safetensors")
    assert choose_files(tmp_path).left_out == []
