from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from cyclopts import App

from engine_installed import needs_engine
from loraplex.cli import adapter_push
from loraplex.cli.adapter_check import choose_base
from loraplex.cli.app import build_app, main
from loraplex.cli.engine_flag import EngineFlags
from loraplex.cli.output import clean
from loraplex.cli.pushed import tell
from loraplex.cli.report import describe_honoured
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.client.location import Location
from loraplex.client.management import Management
from loraplex.client.upload import Upload
from loraplex.demo.batch import BatchProof, compare
from loraplex.demo.next_step import build_hints
from loraplex.demo.question import Asker
from loraplex.demo.team import STYLES, examples_folder
from loraplex_registry.peft.report import build_report
from loraplex_registry.peft.spec import BaseSpec, ModuleSpec
from loraplex_registry.wire.adapter import VersionView

ROOT = Path(__file__).resolve().parents[4]
COMMANDS = """up; gateway; engine; db upgrade; db current; base pull; base list; base register;
tenants create; tenants list; tenants show; tenants update; tenants delete; keys create; keys list; keys revoke;
adapters push; adapters list;
adapters show; adapters promote; adapters rollback; adapters history; adapters retire; adapters restore;
adapters quarantine; adapters release; adapters delete; adapters pull; adapters check; adapters alias; adapters canary;
adapters outcomes; adapters warm; chat; usage;
usage requests; usage reconcile; audit; status; bench"""
PRINTS_DATA = """up; db upgrade; db current; base pull; base list; base register;
tenants create; tenants list; tenants show; tenants update; keys create; keys list;
adapters push; adapters list; adapters show; adapters promote;
adapters rollback; adapters history; adapters restore; adapters quarantine; adapters release; adapters check;
adapters alias; adapters canary; adapters outcomes; adapters warm; chat; usage;
usage requests; usage reconcile; audit; status; bench"""


def words(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", " ").split(";")]


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*command.split(), "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", words(COMMANDS))
def test_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    assert f"Usage: loraplex {command}" in text
    assert "Example" in text


def list_leaves(command: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, child in command.resolved_commands().items():
        if not name.startswith("-"):
            yield from list_leaves(child, (*path, name))
    if command.default_command is not None and path:
        yield path


@pytest.mark.parametrize("command", [" ".join(path) for path in list_leaves(build_app())])
def test_help_of_every_command_teaches_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    told, title, shown = help_of(command, capsys).partition("\nExample")
    assert title, "an example of its own"
    assert f"loraplex {command}" in shown
    assert re.findall(r"^│ \* +[A-Z][A-Z_]*(?: +\[required\])? +│", told, re.MULTILINE) == [], "what NAME is"


@needs_engine
def test_engine_becomes_the_engines_program(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, argv: became.append(argv[1:]))
    flags = "--base tiny --listen 127.0.0.1:1 --registry-url http://r --max-loras 4 --no-enable-prefix-caching"
    assert main(["engine", *flags.split(), "--quantization", "fp8"]) == 0
    program, rest = became[0][:3], became[0][3:]
    assert program == ["-m", "loraplex_engine", "serve"]
    assert set(pairwise(rest)) >= {
        ("--max-loras", "4"),
        ("--quantization", "fp8"),
        ("--base", "tiny"),
    }
    assert "--no-enable-prefix-caching" in rest
    assert main(["engine", "--no-such-flag"]) == 2


@pytest.mark.parametrize("command", words(COMMANDS))
def test_command_is_documented_with_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"`loraplex {command}" in page
    flags = set(re.findall(r"(?<![-\w])--[a-z][a-z-]+(?= |$)", help_of(command, capsys), re.MULTILINE))
    assert {flag for flag in flags if flag not in page} == set()


@pytest.mark.parametrize("command", words(PRINTS_DATA))
def test_command_that_prints_data_prints_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json" in help_of(command, capsys)


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["tenants", "create"], ["up", "--port", "x"], ["up", "--port", "99999"]]
)
def test_wrong_call_is_exit_code_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_what_a_command_wants_by_position_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "revoke", "nonsense"]) == 2
    assert "Usage: loraplex keys revoke TENANT KEY_ID\n" in capsys.readouterr().err
    assert main(["keys", "update", "nonsense", "--json"]) == 2
    assert "Usage: loraplex keys update TENANT KEY_ID" in json.loads(capsys.readouterr().err)["error"]["message"]
    # not where an option is missing
    assert main(["keys", "create", "team-x"]) == 2
    assert "Usage" not in capsys.readouterr().err


def test_the_example_of_an_admins_key_begins_with_its_tenant(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("keys create", capsys)
    assert "loraplex tenants create ops && loraplex keys create ops" in text
    assert "stands under a tenant" in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["tenants", "update", "team-x", "--limit", "requests_per_minute="], "NAME=none, which removes a limit"),
        (["tenants", "list"], "LORAPLEX_API_KEY"),
        (["adapters", "promote", "team-x"], "team-x/default@3"),
        (["adapters", "push", "/no/such/folder", "--as", "team-x"], "not a folder"),
        (["adapters", "push", ".", "--as", "Team X"], "TENANT"),
        (["up", "--once"], "--demo"),
        pytest.param(["up", "--host", "0.0.0.0"], "--insecure-behind-proxy", marks=needs_engine),
    ],
)
def test_failure_says_what_to_do(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    assert main(arguments) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "error:" in shown
    assert reason in shown


def test_misspelt_setting_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORAPLEX_APIKEY", "x")
    assert main(["status"]) == 1
    assert "LORAPLEX_API_KEY" in capsys.readouterr().err


def test_help_imports_nothing_slow(run_python: Callable[[str], str]) -> None:
    program = (
        "import sys; from loraplex.cli.app import main; main(['--help']);"
        "print([name for name in ('httpx', 'sqlalchemy', 'litestar', 'cryptography', 'numpy') if name in sys.modules])"
    )
    assert run_python(program).splitlines()[-1] == "[]"


def test_db_commands_move_a_database_and_tell_its_revision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/x.db"
    assert main(["db", "current", "--url", url, "--json"]) == 3
    before = json.loads(capsys.readouterr().out)
    assert (before["current"], before["is_current"]) == (None, False)
    assert main(["db", "upgrade", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"before": None, "after": before["head"], "copy": None}
    assert main(["db", "current", "--url", url, "--json"]) == 0


def test_engine_flags_go_on_as_the_engine_takes_them() -> None:
    assert EngineFlags().to_argv() == ()
    flags = EngineFlags(max_loras=4, dtype="float32", enable_prefix_caching=False, enforce_eager=True)
    assert flags.to_argv() == (
        "--dtype",
        "float32",
        "--no-enable-prefix-caching",
        "--max-loras",
        "4",
        "--enforce-eager",
    )


def test_text_of_others_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[2Jb\rc\nd\te\x9b") == "a\ufffd[2Jb\ufffdc\nd\te\ufffd"


def smollm2() -> BaseSpec:
    modules = {
        f"model.layers.{layer}.self_attn.{name}": ModuleSpec(features, 576)
        for layer in range(30)
        for name, features in (("q_proj", 576), ("k_proj", 192), ("v_proj", 192), ("o_proj", 576))
    }
    names = ("HuggingFaceTB/SmolLM2-135M-Instruct",)
    return BaseSpec(
        name="smollm2-135m",
        accepted_names=names,
        fingerprint="f",
        weights_digest="w",
        vocab_size=49152,
        modules=modules,
    )


@pytest.mark.parametrize("style", STYLES)
def test_example_adapter_fits_the_small_base_and_is_small(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import msgspec

    folder = tmp_path / "bases" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "base.json").write_bytes(msgspec.json.encode(smollm2()))
    monkeypatch.setenv("LORAPLEX_CACHE_DIR", str(tmp_path))
    example = examples_folder() / style
    assert main(["adapters", "check", str(example), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["base"] == "smollm2-135m"
    assert found["report"]["honoured"]["r"] == 8
    assert sum(path.stat().st_size for path in example.iterdir()) < 1_000_000
    assert {path.name for path in example.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_check_refuses_what_the_registry_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import msgspec

    (tmp_path / "bases" / "b").mkdir(parents=True)
    (tmp_path / "bases" / "b" / "base.json").write_bytes(msgspec.json.encode(smollm2()))
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{")
    (folder / "adapter_model.safetensors").write_bytes(b"PK\x03\x04")
    monkeypatch.setenv("LORAPLEX_CACHE_DIR", str(tmp_path))
    assert main(["adapters", "check", str(folder)]) == 1
    shown = capsys.readouterr()
    assert "fail" in shown.out
    assert "does not fit smollm2-135m" in shown.err


def test_base_to_check_against_is_told_named_or_the_only_one(tmp_path: Path) -> None:
    one, other = smollm2(), BaseSpec("other", (), "f", "w", 8, {})
    config = tmp_path / "adapter_config.json"
    config.write_text('{"base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}')
    assert choose_base([other, one], None, config) is one
    assert choose_base([other, one], "other", config) is other
    assert choose_base([other], None, config) is other
    with pytest.raises(ClientError, match="base pull"):
        choose_base([other], "absent", config)
    with pytest.raises(ClientError, match="--base"):
        choose_base([other, one], None, None)


def test_proof_of_one_batch_is_read_from_the_counters() -> None:
    def scrape(*counts: int, gemms: int) -> str:
        bounds = ("0.0", "1.0", "2.0", "3.0", "4.0", "+Inf")
        lines = [
            f'loraplex_step_{what}_bucket{{le="{bound}"}} {float(count)}'
            for what, shifted in (("adapters", counts), ("requests", (0, *counts[:-2], counts[-1])))
            for bound, count in zip(bounds, shifted, strict=True)
        ]
        lines += [f"loraplex_step_adapters_count {float(counts[-1])}", f"loraplex_base_gemm_calls_total {gemms}.0"]
        return "# HELP x y\n" + "\n".join(lines) + "\n"

    before, after = scrape(5, 6, 6, 6, 6, 6, gemms=720), scrape(6, 8, 9, 12, 12, 12, gemms=1440)
    assert compare(before, after) == BatchProof(
        num_steps=6, max_requests=4, num_steps_at_max=3, max_adapters=3, gemms_per_step=120
    )


def test_hints_can_be_copied_as_they_stand() -> None:
    asker, others = Asker("team-pirate", "lpx_key"), ["team-json", "team-legal"]
    hints = build_hints("http://127.0.0.1:1", "lpx_admin", asker, others, "What is a library?")
    body = re.search(r"-d '(.+)'$", hints, re.MULTILINE)
    assert body
    assert json.loads(body[1])["model"] == "team-pirate"
    program = re.search(r"<<'EOF'\n(.+?)EOF", hints, re.DOTALL)
    assert program
    compile(program[1], "hint", "exec")
    assert "Bearer lpx_key" in hints
    assert "LORAPLEX_API_KEY=lpx_admin" in hints
    assert "keys create team-json --name app" in hints
    assert "team-pirate's: for team-json and team-legal take the admin key, or make them keys" in hints


def test_module_and_script_are_the_same_command(run_python: Callable[[str], str]) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == run_python("from loraplex.version import __version__; print(__version__)").strip()


def test_push_says_what_is_in_effect(capsys: pytest.CaptureFixture[str]) -> None:
    version = VersionView(
        tenant="team-x",
        adapter="default",
        version=1,
        kind="lora",
        digest="sha256:" + "a" * 64,
        state="ready",
        promoted=True,
        base_model="tiny",
        rank=8,
        target_modules=("q_proj",),
        num_parameters=1,
        size_bytes=1,
        created_at="2026-01-01T00:00:00Z",
        created_by="ada",
        report=build_report((), honoured={"r": 8, "use_dora": True, "bias": None}),
    )
    tell(Upload(version, is_new=True), is_default=False)
    assert "\nin effect: r=8, use_dora\n" in capsys.readouterr().err


def test_fields_in_effect_are_one_short_line_of_plain_text() -> None:
    honoured = {
        "r": 8,
        "use_dora": True,
        "use_rslora": False,
        "layers_pattern": [],
        "exclude_modules": None,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 4},
        "modules_to_save": ["x\x1b[2J" * 20],
    }
    line = describe_honoured(honoured)
    head, _, saved = line.partition(", modules_to_save=")
    assert head == 'r=8, use_dora, target_modules=q_proj|v_proj, rank_pattern={"layers.1.self_attn.q_proj": 4}'
    assert len(saved) == 60
    assert saved.endswith("…")
    assert "\x1b" not in line


def test_push_waits_for_whole_seconds_as_the_route_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    seen: list[str] = []

    def take(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.params["wait"])
        return httpx.Response(409, json={"error": {"message": "enough", "code": "conflict"}})

    @contextmanager
    def open_fake() -> Iterator[Management]:
        with Connection(Location("http://gateway", "lpx_key"), httpx.MockTransport(take)) as connection:
            yield Management(connection)

    monkeypatch.setattr(adapter_push, "open_management", open_fake)
    assert main(["adapters", "push", str(tmp_path), "--as", "team-x/bot", "--wait", "60"]) == 1
    assert seen == ["60"]
