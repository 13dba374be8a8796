from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from engines import FolderLoader
from loraplex_engine.bases.folder import load_spec
from loraplex_engine.bases.pull import pull
from loraplex_engine.core.module_group import GROUP_NAMES, find_place
from loraplex_engine.lora import worker
from loraplex_engine.lora.bank import DeviceBank
from loraplex_engine.lora.base_weights import BaseUnreadableError, BaseWeights
from loraplex_engine.lora.disk import AdapterDisk, VerifiedAdapter
from loraplex_engine.lora.pack import UnservableAdapterError, pack
from loraplex_engine.lora.packed import LoadDone, LoadFailed, PackedAdapter
from loraplex_engine.lora.stored import read_tensor, to_bfloat16
from loraplex_engine.lora.worker import Loaded, load
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.decoder import lora_shapes
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.table import LoraTable
from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.spec import TensorRef
from loraplex_registry.wire.adapter import Manifest, ManifestFile
from loraplex_registry.wire.client import ArtifactClient
from support import write_adapter


@pytest.fixture(scope="module")
def base(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pull(str(tiny_llama), tmp_path_factory.mktemp("cache"))


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    assert np.isfinite(values).sum() > 99_000
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(to_bfloat16(values).view(np.int16), expected)


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_stored_tensor_becomes_the_float32_that_torch_reads(name: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = tensor.view(torch.uint8).numpy().tobytes()
    read = read_tensor(io.BytesIO(bytes(7) + raw), TensorRef("t", name, (3, 5), 7, 7 + len(raw)))
    assert torch.equal(torch.from_numpy(read.copy()), tensor.float())


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("model.layers.0.self_attn.q_proj", (0, 0, 0)),
        ("model.layers.12.self_attn.v_proj", (12, 0, 2)),
        ("model.layers.3.mlp.up_proj", (3, 2, 1)),
        ("model.layers.3.mlp.down_proj", (3, 3, 0)),
        ("model.layers.0.self_attn.qkv_proj", None),
        ("model.norm", None),
    ],
)
def test_module_paths_have_one_place_or_none(path: str, place: tuple[int, int, int] | None) -> None:
    assert find_place(path) == place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_adapter_holds_the_file_s_numbers_in_the_model_s_dtype(
    base: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = write_adapter(tmp_path / "a", base, rank=5, targets=["k_proj", "up_proj"], rank_pattern={"up_proj": 3})
    loader = FolderLoader(tmp_path / "adapters", base, load_spec(base), str(dtype).removeprefix("torch."))
    digest = loader.put(folder)
    loader.start(digest)
    (adapter,) = loader.take_finished()
    assert isinstance(adapter, PackedAdapter)
    config = ModelConfig.from_hf(json.loads((base / "config.json").read_text()))
    bank = DeviceBank(LoraTable(2, config.num_layers, lora_shapes(config), 8, dtype), Replacements(2))
    bank.bind(1, adapter)
    _, plan = check_adapter({f.name: f for f in folder.iterdir()}, load_spec(base))
    assert plan is not None
    data = (folder / "adapter_model.safetensors").read_bytes()
    for module in plan.modules:
        layer, group, slice_id = find_place(module.path) or pytest.fail(module.path)
        bound = bank.table.find_module(1, layer, GROUP_NAMES[group], slice_id)
        assert bound is not None
        a, b = (
            torch.frombuffer(bytearray(data[ref.start : ref.stop]), dtype=torch.float32).view(ref.shape)
            for ref in (module.a, module.b)
        )
        assert torch.equal(bound.a, a.to(dtype))
        assert torch.equal(bound.b, b.T.contiguous().to(dtype))
        assert (bound.rank, bound.scaling) == (module.rank, np.float32(module.scaling))


class FolderClient:
    """The registry's artifacts, read from one folder."""

    def __init__(self, folder: Path, num_corrupt: int = 0) -> None:
        self.folder = folder
        self.num_fetches = 0
        self.num_corrupt = num_corrupt

    def manifest(self, digest: str) -> Manifest:
        names = [file.name for file in self.folder.iterdir()]
        files = tuple(ManifestFile(name, (self.folder / name).stat().st_size, "") for name in names)
        return Manifest(digest=digest, base_fingerprint="", files=files, config={})

    def fetch_file(self, digest: str, name: str, to: Path) -> int:
        self.num_fetches += 1
        size = to.write_bytes((self.folder / name).read_bytes())
        if name.endswith(".safetensors") and self.num_corrupt:
            self.num_corrupt -= 1
            _flip_a_bit(to)
        return size


def _flip_a_bit(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(bytes(data))


def _get(disk: AdapterDisk, digest: str) -> VerifiedAdapter:
    with disk.hold(digest) as adapter:
        return adapter


@pytest.mark.parametrize("is_restarted", [False, True])
def test_copy_that_changed_on_disk_is_replaced_by_the_next_load(base: Path, tmp_path: Path, is_restarted: bool) -> None:
    folder = write_adapter(tmp_path / "a", base)
    _, plan = check_adapter({file.name: file for file in folder.iterdir()}, load_spec(base))
    assert plan is not None
    client = FolderClient(folder)
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), client)  # type: ignore[arg-type]
    _get(disk, plan.digest)
    assert client.num_fetches == 2
    _flip_a_bit(next((tmp_path / "adapters").rglob("adapter_model.safetensors")))
    if is_restarted:
        disk = AdapterDisk(tmp_path / "adapters", load_spec(base), client)  # type: ignore[arg-type]
    adapter = _get(disk, plan.digest)
    assert client.num_fetches == 4
    assert adapter.weights.read_bytes() == (folder / "adapter_model.safetensors").read_bytes()


def test_download_that_was_corrupted_once_is_tried_again(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base)
    _, plan = check_adapter({file.name: file for file in folder.iterdir()}, load_spec(base))
    assert plan is not None
    client = FolderClient(folder, num_corrupt=1)
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), client)  # type: ignore[arg-type]
    adapter = _get(disk, plan.digest)
    assert adapter.weights.read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
    assert client.num_fetches == 4


def _load_absent(base: Path, disk: AdapterDisk) -> Loaded:
    return load(f"sha256:{'0' * 64}", disk, BaseWeights(base, load_spec(base), "float32"))


def test_any_failure_of_a_load_is_a_result(base: Path, tmp_path: Path) -> None:
    class BrokenDisk:
        def hold(self, digest: str) -> None:
            raise MemoryError

    failed = load("sha256:x", BrokenDisk(), BaseWeights(base, load_spec(base), "float32"))  # type: ignore[arg-type]
    assert isinstance(failed, LoadFailed)
    assert "MemoryError" in failed.message


def test_bytes_of_another_digest_never_reach_the_cache(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base)
    _, plan = check_adapter({file.name: file for file in folder.iterdir()}, load_spec(base))
    assert plan is not None
    _flip_a_bit(folder / "adapter_model.safetensors")
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), FolderClient(folder))  # type: ignore[arg-type]
    failed = load(plan.digest, disk, BaseWeights(base, load_spec(base), "float32"))
    assert isinstance(failed, LoadFailed)
    assert (failed.code, failed.is_content) == ("digest_mismatch", True)
    assert list((tmp_path / "adapters").rglob("*.safetensors")) == []


def test_adapter_that_no_registry_can_give_is_said_so(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = _load_absent(base, AdapterDisk(tmp_path, load_spec(base), None))
    assert isinstance(failed, LoadFailed)
    assert failed.message == "The registry does not answer."
    assert "--registry-url" in caplog.text
    assert not failed.is_content


@pytest.mark.parametrize(
    ("answer", "content", "message"),
    [
        (404, b"?", "The registry does not have this adapter's files."),
        (403, b"?", "The registry does not answer."),
        (200, b"?", "What the registry sends of this adapter is damaged."),
        (200, b'{"digest":"\xff"}', "What the registry sends of this adapter is damaged."),
        (200, b'{"x":' + b"[" * 100_000, "What the registry sends of this adapter is damaged."),
    ],
    ids=["missing", "forbidden", "text", "bytes", "nested"],
)
def test_a_failed_fetch_is_told_without_internal_routes(
    base: Path, tmp_path: Path, answer: int, content: bytes, message: str
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(answer, content=content))
    client = ArtifactClient("http://registry", "key", transport=transport)
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), client)
    result = _load_absent(base, disk)
    assert isinstance(result, LoadFailed)
    assert (result.stage, result.code, result.message) == ("fetch", "adapter_loading", message)


def test_a_disk_that_fails_is_told_without_its_paths(base: Path, tmp_path: Path) -> None:
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), ArtifactClient("http://registry", "key"))
    (tmp_path / "adapters" / "sha256").write_bytes(b"")
    result = _load_absent(base, disk)
    assert isinstance(result, LoadFailed)
    assert str(tmp_path) not in result.message
    assert "loaded: " in result.message


class _Full:
    """A registry whose answers find no room."""

    def manifest(self, digest: str) -> Manifest:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_and_hurts_only_the_load(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base)
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), _Full())  # type: ignore[arg-type]
    failed = _load_absent(base, disk)
    assert isinstance(failed, LoadFailed)
    assert (failed.stage, failed.message, failed.is_content) == ("fetch", "The replica's disk is full.", False)
    disk.cache.check_integrity()
    assert not isinstance(load(disk.put(folder), disk, BaseWeights(base, load_spec(base), "float32")), LoadFailed)


def test_an_adapter_larger_than_the_disk_cache_is_said_so(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base)
    client = FolderClient(folder)
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), client, max_bytes=1000)  # type: ignore[arg-type]
    failed = _load_absent(base, disk)
    assert isinstance(failed, LoadFailed)
    assert "the disk cache of adapters may have 1000: " in failed.message
    assert failed.message.endswith("has to raise --adapter-cache-bytes")
    assert (failed.is_content, client.num_fetches) == (False, 0)


def test_each_load_tells_what_the_disk_holds_and_what_it_pushed_out(base: Path, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / f"a{seed}", base, seed=seed) for seed in range(3)]
    size = sum(file.stat().st_size for file in folders[0].iterdir())
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), None, max_bytes=2 * size)
    told = []
    for folder in folders:
        facts, descriptor = _load_done(disk.put(folder), disk, base)
        os.close(descriptor)
        told.append((facts.disk_adapters, facts.disk_bytes, facts.disk_evictions))
    assert told == [(1, size, 0), (2, 2 * size, 0), (2, 2 * size, 1)]


def _load_done(digest: str, disk: AdapterDisk, base: Path) -> tuple[LoadDone, int]:
    result = load(digest, disk, BaseWeights(base, load_spec(base), "float32"))
    assert not isinstance(result, LoadFailed), result
    return result


def test_a_file_cut_after_it_was_verified_fails_its_load_and_is_fetched_again_by_the_next(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "a", base)
    digest = AdapterDisk(tmp_path / "other", load_spec(base), None).put(folder)
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), FolderClient(folder))  # type: ignore[arg-type]

    def cut_and_pack(digest: str, adapter: VerifiedAdapter, base: BaseWeights) -> tuple[LoadDone, int]:
        os.truncate(adapter.weights, adapter.weights.stat().st_size - 100)
        return pack(digest, adapter, base)

    with monkeypatch.context() as patched:
        patched.setattr(worker, "pack", cut_and_pack)
        failed = load(digest, disk, BaseWeights(base, load_spec(base), "float32"))
    assert isinstance(failed, LoadFailed)
    assert (failed.stage, failed.is_content) == ("pack", False)
    assert "cut short" in failed.message
    os.close(_load_done(digest, disk, base)[1])


def test_a_download_of_another_length_than_announced_is_not_kept(base: Path, tmp_path: Path) -> None:
    class Longer(FolderClient):
        def fetch_file(self, digest: str, name: str, to: Path) -> int:
            return super().fetch_file(digest, name, to) + 1

    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), Longer(write_adapter(tmp_path / "a", base)))  # type: ignore[arg-type]
    failed = _load_absent(base, disk)
    assert isinstance(failed, LoadFailed)
    assert (failed.message, failed.is_content) == ("What the registry sends of this adapter is damaged.", False)
    disk.cache.check_integrity()
    assert disk.cache.num_folders == 0


@pytest.mark.parametrize(
    ("error", "is_content"), [(UnservableAdapterError("x"), True), (BaseUnreadableError("/y"), False)]
)
def test_a_failure_to_pack_says_whose_it_is(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_content: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(worker, "pack", fail)
    disk = AdapterDisk(tmp_path / "adapters", load_spec(base), None)
    failed = load(disk.put(write_adapter(tmp_path / "a", base)), disk, BaseWeights(base, load_spec(base), "float32"))
    assert isinstance(failed, LoadFailed)
    assert (failed.stage, failed.is_content) == ("pack", is_content)
    assert failed.message.endswith(".")
    assert "/y" not in failed.message


def test_the_loader_knows_no_torch() -> None:
    program = "import sys, loraplex_engine.lora.worker; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
