"""What an engine would compute with: GPU and driver as they are found, compiled ops as they are, or what is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from loraplex_engine.loop import inspection
from loraplex_engine.loop.inspection import Inspected, inspect_machine
from loraplex_engine.ops.native.build import NativeBuildError, name_library

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 24\nGCC version: 12\n"


def look(cache: Path, *, uses_native: bool = True) -> dict[str, Inspected]:
    return {one.check: one for one in inspect_machine(cache, uses_native=uses_native)}


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("_DEVICE", ""), ("_DRIVER", DRIVER)):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(inspection, name, tmp_path / name)


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_DEVICE", "_DRIVER"):
        monkeypatch.setattr(inspection, name, tmp_path / "absent")


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert found["gpu"] == Inspected("gpu", "ok", "No GPU: this engine computes on the CPU.")
    assert torch.__version__ in found["torch"].message


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_named_with_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    assert look(tmp_path)["gpu"] == Inspected("gpu", "ok", "NVIDIA H200, 141 GiB, sm_90, driver 570.86.15.")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("cuda", "verdict", "words"), [(None, "warn", "for the CPU alone"), ("12.8", "fail", "cannot use")]
)
def test_a_gpu_that_torch_cannot_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, verdict: str, words: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = look(tmp_path)["gpu"]
    assert (found.verdict, words in found.message, bool(found.remedy)) == (verdict, True, True)


@pytest.mark.usefixtures("no_gpu")
def test_ops_are_built_or_can_be_or_what_is_lost_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "find_compiler", lambda: "/usr/bin/g++")
    assert "the first start does so with /usr/bin/g++" in look(tmp_path)["ops"].message

    def find_none() -> NoReturn:
        raise NativeBuildError

    monkeypatch.setattr(inspection, "find_compiler", find_none)
    lost = look(tmp_path)["ops"]
    assert (lost.verdict, lost.remedy) == ("warn", "Debian: apt install g++")
    assert "several times slower" in lost.message
    library = name_library(tmp_path)
    library.parent.mkdir(parents=True)
    library.touch()
    assert look(tmp_path)["ops"].verdict == "ok"
    assert look(tmp_path, uses_native=False)["ops"].verdict == "warn"
