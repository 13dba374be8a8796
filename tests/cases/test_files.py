"""Cases of section 2: bad and hostile files. The registry's door and the engine's give one verdict, and run nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from case_world import Cases, World
from engines import text_ids
from loraplex_engine.errors import DigestMismatchError
from loraplex_engine.loop.hooks import TOLERATED, Hooks
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.wire.messages import BindFolder
from loraplex_registry.peft.check import check_adapter
from support import write_adapter, write_safetensors

PROMPT = [(37 * i + 11) % 300 + 3 for i in range(40)]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Damage = Callable[[Path], object]


class _Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.marker), "w")


def write_exploit(file: Path, marker: Path) -> None:
    """A checkpoint as torch wrote it, whose reading by pickle makes the marker."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"x": _Exploit(marker)}))
        archive.writestr("archive/version", "3\n")
    file.write_bytes(content.getvalue())


def write_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def write_payload(folder: Path, change: Callable[[bytes], bytes]) -> None:
    (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def weights(change: Callable[[bytes], bytes]) -> Damage:
    """Damage to the file of weights."""
    return lambda folder: write_payload(folder, change)


def config(**changes: Any) -> Damage:
    """Another config."""
    return lambda folder: write_config(folder, **changes)


def failures(world: World, folder: Path) -> set[str]:
    report, plan = check_adapter({file.name: file for file in folder.iterdir()}, world.loader.spec)
    assert plan is None
    return {check.name for check in report.checks if check.verdict == "fail"}


@pytest.fixture(scope="module")
def world(cases: Cases) -> World:
    return cases.world()


@pytest.fixture
def folder(cases: Cases, tmp_path: Path) -> Path:
    target = tmp_path / "adapter"
    shutil.copytree(cases.folders["F01"], target)
    (target / "README.md").unlink(missing_ok=True)
    return target


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        pytest.param(weights(lambda data: data[:-5]), "truncated", id="b032_short"),
        pytest.param(weights(lambda _: b""), "truncated", id="b032_empty"),
        pytest.param(weights(lambda data: data[:40]), "truncated", id="b032_header_alone"),
        pytest.param(weights(lambda data: data + b"\0" * 5), "header", id="b033_trailing"),
        pytest.param(weights(lambda data: data + data), "header", id="b033_more"),
        pytest.param(
            weights(lambda _: b"version https://git-lfs.github.com/spec/v1\noid x\n"),
            "lfs_pointer",
            id="b045_pointer",
        ),
        pytest.param(weights(lambda _: b"<!DOCTYPE html><p>404"), "format", id="b045_html"),
        pytest.param(weights(lambda _: b"GGUF" + b"\0" * 60), "format", id="b045_gguf"),
        pytest.param(
            weights(lambda _: b"\0" * 257 + b"ustar\0" + b"\0" * 249),
            "format",
            id="b035_tar",
        ),
        pytest.param(config(r=4096), "rank_limit", id="b039_rank"),
        pytest.param(config(r=16), "rank_mismatch", id="b042_rank_lie"),
    ],
)
def test_both_doors_refuse_a_damaged_folder(
    world: World, folder: Path, tmp_path: Path, damage: Damage, check: str
) -> None:
    damage(folder)
    assert failures(world, folder) >= {check}
    engine = AdapterDisk(tmp_path / "engine", world.loader.spec, None)
    with pytest.raises(DigestMismatchError):
        engine.put(folder)
    assert [path for path in (tmp_path / "engine").rglob("*") if path.is_file()] == []


def test_b030_a_pickle_is_refused_and_never_read(world: World, folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    write_exploit(folder / "adapter_model.bin", tmp_path / "marker")
    assert "pickle" in failures(world, folder)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("beside", [True, False], ids=["beside_safetensors", "in_its_place"])
def test_b031_neither_name_nor_company_hides_a_pickle(world: World, folder: Path, tmp_path: Path, beside: bool) -> None:
    write_exploit(folder / ("adapter_model.bin" if beside else WEIGHTS), tmp_path / "marker")
    assert "pickle" in failures(world, folder)
    if not beside:
        with pytest.raises(DigestMismatchError):
            AdapterDisk(tmp_path / "engine", world.loader.spec, None).put(folder)
    assert not (tmp_path / "marker").exists()


def test_b032_the_report_says_how_long_the_file_should_be(world: World, folder: Path) -> None:
    size = (folder / WEIGHTS).stat().st_size
    write_payload(folder, lambda data: data[:-5])
    report, _ = check_adapter({file.name: file for file in folder.iterdir()}, world.loader.spec)
    [message] = [check.message for check in report.checks if check.name == "truncated"]
    assert str(size - 5) in message.replace(",", "") or "5 bytes" in message
    assert report.first_failure is not None


def test_b039_a_rank_above_the_limit_is_refused_before_its_bytes_are_read(
    world: World, cases: Cases, tmp_path: Path
) -> None:
    huge = write_adapter(tmp_path / "huge", cases.base, rank=4096)
    assert (huge / WEIGHTS).stat().st_size > 8 << 20
    tracemalloc.start()
    try:
        assert "rank_limit" in failures(world, huge)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_b039_zeros_up_to_an_allowed_rank_change_nothing(world: World, cases: Cases, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "small", cases.base, rank=4, lora_alpha=4)
    padded = write_adapter(tmp_path / "padded", cases.base, rank=64, lora_alpha=64)
    tensors = {}
    for name, values in read_float32(source / WEIGHTS).items():
        rows, columns = values.shape
        whole = np.zeros((64, columns) if "lora_A" in name else (rows, 64), np.float32)
        whole[:rows, :columns] = values
        tensors[name] = whole
    write_safetensors(padded / WEIGHTS, tensors)
    small, large = world.score([(PROMPT, world.put(source)), (PROMPT, world.put(padded))])
    assert (small - large).abs().max() <= 1e-5


def read_float32(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[8 + size :][slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in header.items()
    }


def test_b040_a_rank_of_a_thousand_in_parts_is_refused_by_both_reasons(
    world: World, cases: Cases, tmp_path: Path
) -> None:
    wild = write_adapter(tmp_path / "wild", cases.base, lora_alpha=100_000)
    write_config(wild, r=1000)
    (wild / WEIGHTS).rename(wild / "adapter_model_part_aa")
    os.truncate(wild / "adapter_model_part_aa", 1 << 30)
    tracemalloc.start()
    try:
        assert failures(world, wild) >= {"rank_limit", "file_set"}
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_b029_nan_ends_its_own_request_and_reaches_nobody_s_pages(cases: Cases, tmp_path: Path) -> None:
    world = cases.world(max_num_batched_tokens=16, max_num_seqs=4)
    clean = cases.world(enable_prefix_caching=False)
    world.loader._disk = AdapterDisk(world.loader.root, world.loader.spec, None, TOLERATED)
    hooks = Hooks(world.engine, world.loader._disk)
    reply = hooks.answer(BindFolder(1, str(write_adapter(tmp_path / "nan", cases.base, std=float("nan")))))
    assert isinstance(reply.body, dict), reply.error
    for _ in range(3):
        bad, base = world.request(PROMPT, str(reply.body["digest"]), 8), world.ask(None, PROMPT, 24)
        events = world.run([bad, base])
        error = events[bad.request_id][-1].error
        assert error is not None
        assert error.code in ("adapter_output_invalid", "adapter_quarantined")
        assert text_ids(events[base.request_id]) == clean.answer(None, PROMPT, 24)
        for name in ("F01", None):
            request = world.ask(name, PROMPT, 24)
            world.engine.add(request)
            while len(request.output_ids) < 5:
                world.engine.step()
            check_pages(world, request.block_ids, request.num_computed)
            world.finish([request.request_id])
            assert request.output_ids == clean.answer(name, PROMPT, 24)
    world.check_idle()


def check_pages(world: World, block_ids: list[int], num_tokens: int) -> None:
    """Fail unless K and V of a request's tokens are numbers."""
    cache = world.engine._runner._cache
    for tensor in (*cache.k, *cache.v):
        assert torch.isfinite(tensor[block_ids].flatten(0, 1)[:num_tokens]).all()
