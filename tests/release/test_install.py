"""`make setup` installs with uv, which is told of indexes what pip is told."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install.py"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_environment_overrides_a_file_and_the_command_the_rest(install: ModuleType) -> None:
    listing = """global.index-url='https://one.test/simple'
global.cert='/a.pem'
install.find-links='/wheels\\nhttps://files.test/it'
freeze.timeout='1'
:env:.index-url='https://two.test/simple'
:env:.config-file='/dev/null'"""
    assert install.read_pip_settings(listing) == {
        "index-url": "https://two.test/simple",
        "cert": "/a.pem",
        "find-links": "/wheels\nhttps://files.test/it",
    }


def test_uv_is_told_what_pip_is_told(install: ModuleType) -> None:
    settings = {
        "index-url": "https://one.test/simple",
        "extra-index-url": "\nhttps://two.test/simple\nhttps://three.test/simple",
        "find-links": "/wheels /more",
        "cert": "/a.pem",
        "proxy": "http://proxy.test:3128",
        "no-index": "true",
        "disable-pip-version-check": "1",
    }
    assert install.translate(settings) == (
        {
            "UV_DEFAULT_INDEX": "https://one.test/simple",
            "UV_EXTRA_INDEX_URL": "https://two.test/simple https://three.test/simple",
            "UV_FIND_LINKS": "/wheels,/more",
            "SSL_CERT_FILE": "/a.pem",
            "HTTP_PROXY": "http://proxy.test:3128",
            "HTTPS_PROXY": "http://proxy.test:3128",
        },
        ["--no-index"],
    )
    assert install.translate({"no-index": "0"}) == ({}, [])


def test_pip_does_it_where_it_was_told_what_uv_cannot_be(install: ModuleType) -> None:
    assert install.translate({"index-url": "https://one.test/simple", "target": "/elsewhere"}) is None


def test_packages_come_from_where_pip_was_told_and_from_nowhere_else(tmp_path: Path) -> None:
    told = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    argv = [sys.executable, str(SCRIPT), "--dry-run", "loraplex-nobody-has"]
    done = subprocess.run(argv, env=os.environ | told, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, "uv ran"
    assert "loraplex-nobody-has was not found in the provided package locations" in done.stderr
    told["PIP_TARGET"] = str(tmp_path)
    done = subprocess.run(argv, env=os.environ | told, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")
