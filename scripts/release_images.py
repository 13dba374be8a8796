"""`make images-check`: build the images from HEAD with buildah, run what they hold, and let their health checks pass.

The base is made here by debootstrap, from the package mirror of this machine: no image registry is asked. Containers
run as the images say, without capabilities, on a read-only root, in namespaces of their own without a network. Needs
root and Debian's packages buildah and debootstrap. `control-plane` or `engine` as argument: that one alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from release_steps import ROOT, StepError, list_lines, read_version, require, run, step

SUITE = "bookworm"
KEPT = ROOT / "build/images"
BASE = KEPT / f"base-{SUITE}"
BUILDAH = ("buildah", "--root", str(KEPT / "storage"), "--runroot", str(KEPT / "run"), "--storage-driver", "overlay")
BUILD_ENV = {"BUILDAH_ISOLATION": "chroot", "BUILDAH_FORMAT": "docker"}
USER = "10001:10001"
WRITABLE = ("/var/lib/loraplex", "/var/cache/loraplex")
_READY_S = {"control-plane": 90.0, "engine": 600.0}
_STOP_S = 90.0


@dataclass(frozen=True)
class Image:
    """An image that was built: its root folder here, and what its config says."""

    root: Path
    config: dict[str, Any]

    def words(self, *arguments: str) -> list[str]:
        """What a container with these arguments runs."""
        return [*self.config["Entrypoint"], *(arguments or self.config["Cmd"])]


def main(names: Sequence[str]) -> None:
    """Check each image."""
    with step("root, buildah, debootstrap"):
        require(os.geteuid() == 0, "run it as root")
        missing = [name for name in ("buildah", "debootstrap", "nsenter", "unshare", "ip") if not shutil.which(name)]
        require(not missing, f"not found: {', '.join(missing)}; apt-get install buildah debootstrap iproute2")
    with step("an unset pin ends the build"):
        check_unset_pin()
    digest = make_base()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="loraplex-images-") as folder:
            check(name, digest, Path(folder))


def check_unset_pin() -> None:
    """images/build.sh refuses to guess a base."""
    environ = os.environ | {"PINS": "/dev/null", "BUILDER": "false"}
    done = subprocess.run([ROOT / "images/build.sh"], env=environ, capture_output=True, text=True, check=False)
    require(done.returncode == 1 and "DEBIAN_IMAGE must be NAME@sha256" in done.stderr, f"it said: {done.stderr}")


def make_base() -> str:
    """Return the digest of a minimal Debian in buildah's storage, made once."""
    with step(f"base: a minimal Debian {SUITE}") as facts:
        if not (BASE / "etc/debian_version").exists():
            shutil.rmtree(BASE, ignore_errors=True)
            BASE.mkdir(parents=True)
            sources = "\n".join(file.read_text() for file in _find_sources())
            mirrors = re.findall(r"https?://\S+", re.sub(r"#.*", "", sources))
            require(bool(mirrors), "no mirror in /etc/apt")
            run("debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, BASE, mirrors[0])
        if not _find_base():
            _take_over_access()
            container = run(*BUILDAH, "from", "scratch").strip()
            run(*BUILDAH, "add", "--quiet", container, BASE, "/")
            run(*BUILDAH, "commit", "--quiet", "--rm", container, f"localhost/debian:{SUITE}")
        digest = _find_base()
        facts.append(digest)
    return digest


def _find_base() -> str:
    """Return the digest of the base in buildah's storage, or nothing."""
    words = ("images", "--noheading", "--filter", "reference=localhost/debian", "--format", "{{.Digest}}")
    return run(*BUILDAH, *words).strip()


def _find_sources() -> list[Path]:
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("debian*"))]
    return [file for file in files if file.exists()]


def _take_over_access() -> None:
    """Give the base this machine's way to packages: mirrors and authorities."""
    (BASE / "etc/apt/sources.list").unlink(missing_ok=True)
    for file in _find_sources():
        shutil.copy(file, BASE / file.relative_to("/"))
    # by a name of its own: the base's file is written anew when its package is upgraded
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", BASE / "etc/ssl/authorities-of-this-machine.pem")
    (BASE / "etc/pip.conf").write_text("[global]\ncert = /etc/ssl/authorities-of-this-machine.pem\n")


def check(name: str, digest: str, work: Path) -> None:
    """Build one image and run it."""
    version = read_version()
    with step(f"{name}: context from HEAD"):
        source = write_context(name, work)
    with step(f"{name}: images/build.sh"):
        pins = work / "pins.env"
        pins.write_text(f"DEBIAN_IMAGE=localhost/debian@{digest}\n")
        volumes = ("--volume", f"{work}/wheels:/wheels-of-this-machine:ro") if (work / "wheels").exists() else ()
        # BUILDER is a program and its options; `build` and the rest come behind it
        wrapper = work / "builder"
        options = " ".join(volumes)
        wrapper.write_text(f'#!/bin/sh\nshift\nexec {" ".join(BUILDAH)} build {options} "$@"\n')
        wrapper.chmod(0o755)
        environ = os.environ | BUILD_ENV | {"PINS": str(pins), "BUILDER": str(wrapper), "REGISTRY": "localhost/"}
        run("images/build.sh", name, cwd=source, env=environ, timeout_s=3600)
    tag = f"localhost/loraplex-{name}:{version}"
    container = run(*BUILDAH, "from", tag).strip()
    try:
        config = json.loads(run(*BUILDAH, "inspect", "--type", "image", tag))["Docker"]["config"]
        image = Image(Path(run(*BUILDAH, "mount", container).strip()), config)
        check_image(name, image, version)
        run_image(name, image, work)
    finally:
        run(*BUILDAH, "rm", container)
        run(*BUILDAH, "rmi", tag)


def write_context(name: str, work: Path) -> Path:
    """Return the committed files; the engine's lock asks for the CPU's build of PyTorch unless TORCH=cuda."""
    source = work / "source"
    source.mkdir()
    run("git", "archive", "--format=tar", f"--output={work}/source.tar", "HEAD")
    with tarfile.open(work / "source.tar") as archive:
        archive.extractall(source, filter="data")
    if name == "engine" and os.environ.get("TORCH") != "cuda":
        wheels = work / "wheels"
        options = ("--quiet", "--no-deps", "--dest", wheels, "-c", ROOT / "requirements/cpu.txt")
        run(ROOT / ".venv/bin/python", "-m", "pip", "download", *options, "torch", cwd=work)
        (wheel,) = wheels.glob("torch-*.whl")
        require("+cpu" in wheel.name, f"{wheel.name} is no build for the CPU; use TORCH=cuda")
        lock = source / "requirements/engine.txt"
        lock.write_text(replace_torch(lock.read_text(encoding="utf-8"), wheel), encoding="utf-8")
    return source


def replace_torch(lock: str, wheel: Path) -> str:
    """Return the lock with this wheel in the place of PyTorch's CUDA build and of what that alone brings."""
    entries = re.split(r"\n(?=\S)", lock)
    kept = [entry for entry in entries if not re.match(r"(torch|triton|nvidia-\S*|cuda-\S*)==", entry)]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    torch = f"torch=={wheel.name.split('-')[1]} --hash=sha256:{digest}"
    return "\n".join(["--find-links /wheels-of-this-machine", *kept, torch, ""])


def check_image(name: str, image: Image, version: str) -> None:
    """What the image says of itself, what it holds and what not."""
    with step(f"{name}: config and contents") as facts:
        config = image.config
        require(config["User"] == USER, f"user {config['User']}")
        require(config["Labels"]["org.opencontainers.image.version"] == version, "the label has another version")
        require(config["Healthcheck"]["Test"][:2] == ["CMD", "loraplex-healthcheck"], "no health check")
        packages = image.root / "opt/loraplex/lib/python3.11/site-packages"
        found = {path.name for path in packages.iterdir()}
        require("loraplex" in found, "loraplex is not installed")
        unwanted = {"torch", "transformers", "pip", "setuptools", "pytest"} if name == "control-plane" else {"pytest"}
        require(not unwanted & found, f"it holds {sorted(unwanted & found)}")
        sbom = json.loads((image.root / "opt/loraplex/sbom.cdx.json").read_text())
        listed = {
            re.sub(r"[-_.]+", "-", part["name"].lower())
            for part in (*sbom["components"], sbom["metadata"]["component"])
        }
        installed = {
            re.sub(r"[-_.]+", "-", name.split("-")[0].lower()) for name in found if name.endswith(".dist-info")
        }
        require(listed == installed, f"SBOM and packages differ:\n{list_lines(sorted(listed ^ installed))}")
        facts.append(f"SBOM of {len(listed)} packages")
        leaked = [str(path) for place in ("src", "wheels", "build") for path in image.root.glob(f"{place}/*")]
        require(not leaked, f"left from the build:\n{list_lines(leaked)}")
        loose = [
            str(path.relative_to(image.root))
            for folder in ("opt", "usr/local")
            for path in (image.root / folder).rglob("*")
            if not path.is_symlink() and (path.stat().st_uid == 10001 or path.stat().st_mode & 0o6002)
        ]
        require(not loose, f"its user may change:\n{list_lines(loose)}")
        size, base = (int(run("du", "-sm", root).split()[0]) for root in (image.root, BASE))
        facts.append(f"{size} MiB unpacked, {base} of them the base")


def run_image(name: str, image: Image, work: Path) -> None:
    """The image's commands, as its user on a read-only root, until its health check passes."""
    folders = {place: work / place.replace("/", "_") for place in WRITABLE}
    for folder in folders.values():
        folder.mkdir()
        os.chown(folder, 10001, 10001)
    with step(f"{name}: --version, and a root that cannot be written"):
        said = run_once(image, folders, image.words("--version"))
        require(said.strip() == read_version(), f"it said {said}")
        program = "id -u; touch /opt/x /usr/x /etc/x /var/x 2>/dev/null || echo refused; touch /tmp/x"
        done = run_once(image, folders, ["sh", "-c", program])
        require(done.split() == ["10001", "refused"], f"it said {done}")
    if name == "control-plane":
        with step("control-plane: db upgrade"):
            run_once(image, folders, image.words("db", "upgrade"))
        test = image.config["Healthcheck"]["Test"]
        serve(name, image, folders, image.words("gateway", "--insecure-behind-proxy"), test)
        serve_registry(image, folders)
    else:
        cache = Path(os.environ.get("LORAPLEX_CACHE_DIR", Path.home() / ".cache/loraplex")) / "bases/smollm2-135m"
        require(cache.is_dir(), "the base is not in this machine's cache: make base")
        place = folders["/var/cache/loraplex"] / "bases/smollm2-135m"
        shutil.copytree(cache, place)
        run("chown", "-R", USER, folders["/var/cache/loraplex"])
        service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["loraplex"]
        words, test = image.words(*service["command"]), service["healthcheck"]["test"]
        # its gateway is healthy before its engine serves
        serve(name, image, folders, words, test, says="Ctrl-C stops it.")
        serve_engine(image, folders)


def serve_registry(image: Image, folders: dict[str, Path]) -> None:
    """The registry as a process of its own, as the chart runs it, with the key that the gateway left."""
    key = "/var/lib/loraplex/signing.pem"
    program = (
        "from pathlib import Path; from cryptography.hazmat.primitives.serialization import *; "
        f"key = load_pem_private_key(Path('{key}').read_bytes(), None).public_key(); "
        "Path('verify.pem').write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))"
    )
    run_once(image, folders, ["python", "-c", program])
    env = {"LORAPLEX_LISTEN": "0.0.0.0:8081", "LORAPLEX_VERIFY_KEYS_FILE": "/var/lib/loraplex/verify.pem"}
    test = ["CMD", "loraplex-healthcheck", "http://127.0.0.1:8081/healthz"]
    serve("control-plane", image, folders, ["python", "-m", "loraplex_registry"], test, env)


def serve_engine(image: Image, folders: dict[str, Path]) -> None:
    """`loraplex engine` alone, with the keys that `up` left, under the image's own health check."""
    env = {
        "LORAPLEX_VERIFY_KEYS_FILE": "/var/lib/loraplex/verify.pem",
        "LORAPLEX_ENGINE_KEY_FILE": "/var/lib/loraplex/engine.key",
        "LORAPLEX_REGISTRY_URL": "http://127.0.0.1:8080",
    }
    words = image.words("engine", "--base", "smollm2-135m")
    serve("engine", image, folders, words, image.config["Healthcheck"]["Test"], env)


def build_container(
    image: Image, folders: dict[str, Path], words: Sequence[str], env: dict[str, str] | None = None
) -> list[str]:
    """Return the command that runs `words` as a container would: namespaces, read-only root, user, no capabilities."""
    root = image.root
    script = [
        "set -e",
        "ip link set lo up",
        f"mount --bind {root} {root}",
        f"mount -t proc proc {root}/proc",
        f"mount -t tmpfs tmpfs {root}/tmp",
        f"mount -t tmpfs tmpfs {root}/dev",
        *(f"mknod -m 666 {root}/dev/{name} c 1 {minor}" for name, minor in (("null", 3), ("zero", 5), ("urandom", 9))),
        f"mkdir -m 1777 {root}/dev/shm",
        *(f"mount --bind {folder} {root}{place}" for place, folder in folders.items()),
        f"mount -o remount,bind,ro {root}",
        'exec "$@"',
    ]
    namespaces = ("--mount", "--pid", "--net", "--ipc", "--uts", "--propagation", "private", "--fork", "--kill-child")
    return ["unshare", *namespaces, "bash", "-c", "\n".join(script), "container", *enter(image, words, env)]


def enter(image: Image, words: Sequence[str], env: dict[str, str] | None = None) -> list[str]:
    """Return the command that runs `words` inside the root, as the image's user."""
    user, group = image.config["User"].split(":")
    drop = ("--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
    settings = [*image.config["Env"], *(f"{name}={value}" for name, value in (env or {}).items())]
    return [
        *("chroot", str(image.root), "/usr/bin/env", "-i", f"--chdir={image.config['WorkingDir']}", *settings),
        *("/usr/bin/setpriv", f"--reuid={user}", f"--regid={group}", *drop, *words),
    ]


def run_once(image: Image, folders: dict[str, Path], words: Sequence[str]) -> str:
    """Return what a command in a container prints."""
    return run(*build_container(image, folders, words), timeout_s=300)


def serve(
    name: str,
    image: Image,
    folders: dict[str, Path],
    words: Sequence[str],
    test: Sequence[str],
    env: dict[str, str] | None = None,
    *,
    says: str = "",
) -> None:
    """Run a server, wait for its health check and for what it says when all of it serves, stop it."""
    with step(f"{name}: {' '.join(words)}; {' '.join(test[1:])}; SIGTERM") as facts:
        require(test[0] == "CMD", f"the health check is {test}")
        command = build_container(image, folders, words, env)
        with tempfile.NamedTemporaryFile("r+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd="/")
            try:
                began_at = time.monotonic()
                pid = _wait_until_healthy(process, image, test[1:], _READY_S[name])
                facts.append(f"healthy after {time.monotonic() - began_at:.1f} s")
                while says not in Path(log.name).read_text(encoding="utf-8"):
                    is_late = time.monotonic() - began_at > _READY_S[name]
                    require(not is_late and process.poll() is None, f"it never said: {says}")
                    time.sleep(0.5)
                os.kill(pid, signal.SIGTERM)
                require(process.wait(_STOP_S) == 0, f"it ended with {process.returncode}")
            except (StepError, subprocess.TimeoutExpired) as error:
                log.seek(0)
                raise StepError(f"{error}\n{log.read()[-3000:]}") from error
            finally:
                process.kill()
                process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], image: Image, test: Sequence[str], seconds: float) -> int:
    """Return the process id of the container's first process once the health check has passed in its namespaces."""
    said = ""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children:
            inside = ("nsenter", "--target", children[0], "--mount", "--net", "--pid", "--ipc")
            words = [*inside, *enter(image, test)]
            done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/", timeout=30)
            if done.returncode == 0:
                return int(children[0])
            said = done.stdout + done.stderr
        time.sleep(0.5)
    raise StepError(f"not healthy; the check said: {said}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["control-plane", "engine"])
