"""The images' files: lint, what each image must say, a pin that nobody guesses. `make images-check` runs the images."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from compose_spec.compose_spec import PyCompose

from loraplex.version import __version__
from loraplex_registry.wire.setting import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("control-plane", "engine")
UNSET = ": DEBIAN_IMAGE must be NAME@sha256:<64 hex digits>"
DIGEST = "debian:bookworm-slim@sha256:" + 64 * "0"


def read_steps(image: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their words, continued lines joined."""
    text = (ROOT / f"images/{image}.Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines if line.strip()]


def read_last_stage(image: str) -> list[tuple[str, str]]:
    """The instructions that the image itself is made of."""
    steps = read_steps(image)
    return steps[max(i for i, (word, _) in enumerate(steps) if word == "FROM") :]


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_has_nothing_to_say(image: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    words = [hadolint, "--config", ROOT / ".hadolint.yaml", ROOT / f"images/{image}.Dockerfile"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_every_base_is_the_pinned_one(image: str) -> None:
    stages = [words.split() for word, words in read_steps(image) if word == "FROM"]
    named = {words[2] for words in stages if len(words) == 3}
    assert {words[0] for words in stages} - named == {"${DEBIAN_IMAGE}"}
    assert read_steps(image)[0] == ("ARG", "DEBIAN_IMAGE"), "no default: an unset pin is an error"


@pytest.mark.parametrize("image", IMAGES)
def test_packages_come_by_hash_and_as_wheels(image: str) -> None:
    installs = [part for _, words in read_steps(image) for part in words.split("&&") if "pip install" in part]
    assert len(installs) == 3
    for words in installs:
        assert "--require-hashes" in words or {"--no-index", "--no-deps"} <= set(words.split())
    lock = next(words for words in installs if f"requirements/{image}.txt" in words)
    assert "--only-binary :all:" in lock


@pytest.mark.parametrize(("image", "port"), [("control-plane", 8080), ("engine", 8100)])
def test_image_runs_as_nobody_that_owns_its_files_and_has_a_health_check(image: str, port: int) -> None:
    stage = read_last_stage(image)
    steps = dict(stage)
    assert steps["USER"] == "10001:10001"
    assert [words for word, words in stage if word == "COPY" and "--chown" in words] == []
    assert steps["ENTRYPOINT"] == '["loraplex"]'
    assert f'CMD ["loraplex-healthcheck", "http://127.0.0.1:{port}/readyz"]' in steps["HEALTHCHECK"]
    assert f"LORAPLEX_LISTEN=0.0.0.0:{port}" in steps["ENV"]
    assert steps["EXPOSE"] == str(port)
    assert "VOLUME" not in steps, "a volume that nobody asked for is kept for ever"


def test_the_chart_runs_these_images_as_their_user() -> None:
    values = yaml.safe_load((ROOT / "helm/loraplex/values.yaml").read_text(encoding="utf-8"))
    names = [values["image"][key]["repository"] for key in ("controlPlane", "engine")]
    assert names == [f"loraplex-{image}" for image in IMAGES]
    user = f"{values['security']['runAsUser']}:{values['security']['runAsGroup']}"
    assert {dict(read_last_stage(image))["USER"] for image in IMAGES} == {user}


@pytest.mark.parametrize("image", IMAGES)
def test_image_sets_only_what_is_a_setting(image: str) -> None:
    known = {setting.name for setting in SETTINGS if setting.is_built}
    assert set(re.findall(r"\bLORAPLEX_[A-Z_]+", dict(read_last_stage(image))["ENV"])) <= known


def test_both_images_are_made_in_the_same_way() -> None:
    """Where the control plane's file changes, the engine's has to follow: they share all but packages and ports."""
    control_plane, engine = (
        [word for word, _ in read_steps(image) if word not in {"ENV", "LABEL"}] for image in IMAGES
    )
    assert control_plane == engine


@pytest.mark.parametrize("image", IMAGES)
def test_copied_files_are_let_in_and_there(image: str) -> None:
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [line[1:] for line in allowed if line.startswith("!")]
    copies = [words.split()[:-1] for word, words in read_steps(image) if word == "COPY" and "--from" not in words]
    for source in (name for names in copies for name in names):
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(pattern) or source.startswith(f"{pattern}/") for pattern in allowed), source


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "not ''"),
        ("DEBIAN_IMAGE=", "not ''"),
        ("DEBIAN_IMAGE=debian:bookworm-slim", "not 'debian:bookworm-slim'"),
        (f"DEBIAN_IMAGE={DIGEST[:-1]}", "not 'debian"),
    ],
)
def test_build_ends_without_a_digest(line: str, complaint: str, tmp_path: Path) -> None:
    done = run_build(tmp_path, line)
    assert done.returncode == 1
    assert UNSET in done.stderr
    assert complaint in done.stderr
    assert done.stdout == "", "nothing was built"


def test_build_passes_pin_version_and_revision_on(tmp_path: Path) -> None:
    done = run_build(tmp_path, f"DEBIAN_IMAGE={DIGEST}", "engine")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:3] == ["build", "--file", "images/engine.Dockerfile"]
    assert {f"loraplex-engine:{__version__}", f"DEBIAN_IMAGE={DIGEST}", f"VERSION={__version__}"} <= set(words)


def run_build(folder: Path, line: str, *images: str) -> subprocess.CompletedProcess[str]:
    """images/build.sh with these pins and a builder that prints what it is told."""
    pins = folder / "pins.env"
    pins.write_text(line + "\n", encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name not in {"DEBIAN_IMAGE", "REGISTRY"}}
    env |= {"PINS": str(pins), "BUILDER": "echo"}
    words = [ROOT / "images/build.sh", *images]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def read_compose() -> str:
    """compose.yaml as it is without settings of the caller."""
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    return re.sub(r"\$\{[A-Z]+:-([^}]*)\}", r"\1", text)


def check_compose(text: str) -> None:
    """Fail where the text is not what the compose specification allows."""
    PyCompose.from_yaml(text).validate()


def test_compose_file_is_valid() -> None:
    check_compose(read_compose())
    with pytest.raises(ValueError, match="stop_grace"):
        check_compose(read_compose().replace("stop_grace_period", "stop_grace"))


def test_compose_runs_this_version_confined_and_on_loopback() -> None:
    service = yaml.safe_load(read_compose())["services"]["loraplex"]
    assert service["image"] == f"loraplex-engine:{__version__}"
    assert service["ports"] == ["127.0.0.1:8080:8080"]
    assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])
    env = dict(word.split("=", 1) for word in dict(read_last_stage("engine"))["ENV"].split())
    places = {volume.split(":")[1] for volume in service["volumes"]}
    assert places == {env["LORAPLEX_DATA_DIR"], env["LORAPLEX_CACHE_DIR"]}


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        """Keep quiet."""


@pytest.mark.enable_socket
@pytest.mark.parametrize(("path", "code"), [("/readyz", 0), ("/elsewhere", 1)])
def test_health_check_says_what_the_server_says(path: str, code: int) -> None:
    with HTTPServer(("127.0.0.1", 0), _Answer) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}{path}"
        env = os.environ | {"http_proxy": "http://127.0.0.1:9"}
        words = [sys.executable, "-I", ROOT / "images/healthcheck.py", url]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        server.shutdown()
    assert done.returncode == code, done.stdout
