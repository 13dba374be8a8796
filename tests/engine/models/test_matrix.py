"""The hashes of a base's embedding and head are those of torch's casts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex_engine.bases import matrix
from loraplex_engine.bases.folder import load_spec, write_spec
from loraplex_engine.bases.matrix import cast, hash_matrices
from loraplex_engine.bases.pull import pull
from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.weights.index import read_index
from support import tiny_llama_config, write_base

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def hash_tensor(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_casts_are_those_of_torch() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = torch.arange(2000, dtype=torch.int32) * 0x8000 + 0x3F80_0000
    values = torch.cat([bits, ties]).view(torch.float32)
    values = values[values.isfinite()]
    for name, dtype in DTYPES.items():
        assert cast(values.numpy(), name) == values.to(dtype).view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES.values()])
def test_each_matrix_is_hashed_in_each_dtype_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(matrix, "_PIECE_ITEMS", 7)
    matrices = {path: torch.randn(5, 8).to(dtype) for path in ("model.embed_tokens", "lm_head")}
    save_file({f"{path}.weight": tensor for path, tensor in matrices.items()}, tmp_path / "model.safetensors")
    expected = {
        path: {name: hash_tensor(tensor.float().to(each)) for name, each in DTYPES.items()}
        for path, tensor in matrices.items()
    }
    index = read_index(tmp_path)
    assert hash_matrices(index, is_tied=False) == expected
    assert hash_matrices(index, is_tied=True) == {"model.embed_tokens": expected["model.embed_tokens"]}


def test_a_file_that_is_cut_short_under_our_eyes_ends_the_hashing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(5, 8)}, file)
    index = read_index(tmp_path)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(BaseUnsupportedError, match="cut short"):
        hash_matrices(index, is_tied=True)


@pytest.mark.parametrize("again", ["by source", "by folder"])
def test_a_base_that_was_pulled_before_there_were_hashes_gets_them_by_a_pull(tmp_path: Path, again: str) -> None:
    source = write_base(tmp_path / "src" / "llama", tiny_llama_config())
    folder = pull(str(source), tmp_path / "cache")
    spec = load_spec(folder)
    head = load_file(source / "model.safetensors")["lm_head.weight"]
    assert spec.matrix_hashes["lm_head"]["F32"] == hash_tensor(head)
    write_spec(folder, msgspec.structs.replace(spec, matrix_hashes={}))
    pull(str(source if again == "by source" else folder), tmp_path / "cache")
    assert load_spec(folder) == spec
