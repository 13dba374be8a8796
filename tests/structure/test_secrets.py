"""No key lies in the tree, and each kind would be found."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from loraplex.keys.secret import new_key_text
from loraplex_registry.wire.identity import generate_signing_key

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "find_secrets.py"


@pytest.fixture(scope="module")
def finder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("find_secrets", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_key_lies_in_the_tree() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout == "no keys\n"


# in pieces, or they would be found here
PLANTED = {
    "a key of AWS": "AKIA" + "ABCDEFGHIJKLMNOP",
    "a token of GitHub": "gh" + "p_" + "a1" * 18,
    "a token of Hugging Face": "hf" + "_" + "a1" * 17,
    "a key of OpenAI": "sk" + "-proj-" + "a1" * 24,
    "a token of Slack": "xox" + "b-" + "1234567890-abcdefghijkl",
    "a key of Google": "AI" + "za" + "a1" * 17 + "b",
    "a signed token": "ey" + "JhbGciOiJub25lIn0.ey" + "JhdWQiOiJ4eHh4In0." + "a1" * 20,
    "a password in an address": "postgresql+psycopg:/" + "/loraplex:hunter2@db/loraplex",
}


@pytest.mark.parametrize("kind", [*PLANTED, "a key of Loraplex", "a private key"])
def test_a_key_of_each_kind_is_found_and_not_shown(finder: ModuleType, kind: str, tmp_path: Path) -> None:
    planted = {
        **PLANTED,
        "a key of Loraplex": new_key_text(),
        "a private key": generate_signing_key().decode(),
    }[kind]
    file = tmp_path / "notes.txt"
    file.write_text(f"first line\nvalue: {planted}\n")
    [line] = finder.search([file])
    assert f":2: {kind}: " in line
    assert planted not in line
    assert {name for name, _, _ in finder.KINDS} == {*PLANTED, "a key of Loraplex", "a private key"}


@pytest.mark.parametrize(
    "text", ["lpx_" + "A" * 10 + "_" + "B" * 49, "http://127.0.0.1:8080/v1", "redis://$USER:$PASSWORD@host", "sk-short"]
)
def test_what_is_none_is_not_found(finder: ModuleType, text: str) -> None:
    assert list(finder.find_secrets(text)) == []
