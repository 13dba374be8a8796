"""Reading weights: through the mapping, sharded or not, and never from a file that is not whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.loop.memory import plan_memory
from loraplex_engine.models.config import load_config
from loraplex_engine.weights.index import hash_tensors, read_index
from loraplex_engine.weights.source import WeightSource
from support import tiny_llama_config, write_base
from support_models import shard


def test_shards_read_as_one_file(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shard(tiny_llama, tmp_path / "sharded")
    whole, shards = WeightSource(tiny_llama), WeightSource(folder)
    index = read_index(tiny_llama)
    assert list(index) == sorted(index) == list(read_index(folder))
    assert all(torch.equal(whole.get(name), shards.get(name)) for name in index)
    assert hash_tensors(index.values()) == hash_tensors(read_index(folder).values())


def test_values_equal_safetensors_in_every_dtype(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        base = write_base(tmp_path / dtype, tiny_llama_config(), dtype=dtype)
        source = WeightSource(base)
        for name, tensor in load_file(base / "model.safetensors").items():
            assert source.get(name).dtype is getattr(torch, dtype)
            assert torch.equal(source.get(name), tensor)
            assert torch.equal(source.read(name, torch.float32), tensor.float())


def test_fused_tensors_stand_one_below_the_other(tiny_llama: Path) -> None:
    source = WeightSource(tiny_llama)
    names = [f"model.layers.1.self_attn.{leaf}_proj.weight" for leaf in "qkv"]
    fused = source.read_fused(names, torch.bfloat16)
    assert torch.equal(fused, torch.cat([source.get(name) for name in names]).bfloat16())


def test_a_released_tensor_is_read_again_from_the_file(tiny_llama: Path) -> None:
    source = WeightSource(tiny_llama)
    name = "model.embed_tokens.weight"
    view, before = source.get(name), source.get(name).clone()
    source.release_all()
    assert torch.equal(view, before)


_MEMORY_PROGRAM = """
import sys, torch
from pathlib import Path
from loraplex_engine.weights.source import WeightSource
def anonymous_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
source = WeightSource(Path(sys.argv[1]))
names = ["a", "b"]
torch.zeros(1).sum()
before = anonymous_kib()
total = sum(source.get(name).sum() for name in names)
print(anonymous_kib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_reading_makes_no_anonymous_copy(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4 << 20), "b": torch.ones(4 << 20)}, tmp_path / "model.safetensors")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _MEMORY_PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < 4 << 10, "32 MiB were read; less than 4 may be ours"


_DECODER_PROGRAM = """
import ctypes, sys, torch
from pathlib import Path
from loraplex_engine.models.config import load_config
from loraplex_engine.models.decoder import Decoder
from loraplex_engine.weights.source import WeightSource
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
def mapped(folder):
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = str(folder) in line
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total
torch.set_num_threads(1)
torch.ones(8, 8) @ torch.ones(8, 8)
decoders = []
for folder, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    config = load_config(Path(folder))
    before = anonymous()
    decoders.append(Decoder(config, WeightSource(Path(folder)), getattr(torch, dtype)))
    # what the allocator keeps of buffers that were given back
    ctypes.CDLL(None).malloc_trim(0)
    print(anonymous() - before, mapped(folder))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_weights_are_held_once(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 8192, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    # in one process, as its start is most of the time; each is measured beside those before it
    command = [sys.executable, "-c", _DECODER_PROGRAM]
    plans = []
    for is_tied, dtype in ((True, "float32"), (False, "bfloat16")):
        base = write_base(tmp_path / dtype, tiny_llama_config(**sizes, **heads, tie_word_embeddings=is_tied))
        command += [str(base), dtype]
        itemsize = 4 if dtype == "float32" else 2
        config = EngineConfig(base="", cache_dir="")
        plans.append(plan_memory(config, load_config(base), itemsize, is_mapped=dtype == "float32"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    slack = 8 << 20
    for plan, line in zip(plans, done.stdout.splitlines(), strict=True):
        ours, files = map(int, line.split())
        assert plan.fixed_bytes * 0.9 < ours < plan.fixed_bytes * 1.1 + slack, "packed once, and what is foreseen"
        assert files < slack, "the pages of what was packed are given back"


def test_a_cut_file_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    data = (tiny_llama / "model.safetensors").read_bytes()
    for length in (0, 7, 100, len(data) - 1):
        (tmp_path / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(BaseUnsupportedError, match=r"model\.safetensors"):
            read_index(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": "none"}}',
        b'{"a": 5}',
        b"{",
    ],
)
def test_a_header_that_makes_no_sense_is_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(BaseUnsupportedError, match=r"model\.safetensors"):
        read_index(tmp_path)


def test_a_missing_shard_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shard(tiny_llama, tmp_path / "sharded")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BaseUnsupportedError, match="model-00002-of-00002"):
        read_index(folder)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    with pytest.raises(BaseUnsupportedError, match="outside"):
        read_index(tmp_path)


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"lm_head.qweight": torch.ones(4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(BaseUnsupportedError, match=r"lm_head\.qweight is I32"):
        read_index(tmp_path)
