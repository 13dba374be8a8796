"""What adapters change outside the layers' linears, beside rows of the base that must not notice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex_engine.core.module_group import EMBEDDING_GROUP, HEAD_GROUP
from support_models import PagedModel, load_paged, load_reference, reference_logits

TOLERANCE = 1e-4
PROMPT = [3, 17, 301, 44, 5, 5, 208, 90, 11, 63, 127, 2, 256, 8, 19, 77, 33, 150, 4, 9, 61]
SLOT = 2
Change = Callable[[PagedModel, dict[str, Tensor]], None]


def _adapt_key(model: PagedModel, tensors: dict[str, Tensor]) -> None:
    """Plain LoRA in one layer: an adapter never replaces only."""
    name = "model.layers.0.self_attn.k_proj.weight"
    out_features, in_features = tensors[name].shape
    a, b = 0.2 * torch.randn(3, in_features), 0.2 * torch.randn(3, out_features)
    model.table.set_module(SLOT, 0, "qkv", 1, a, b, 0.5)
    tensors[name] += 0.5 * b.T @ a


def _replace_norms(model: PagedModel, tensors: dict[str, Tensor]) -> None:
    for name, gain in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.5 * torch.rand_like(gain)
            model.replacements.set_norm(SLOT, name.removesuffix(".weight"), tensors[name])


def _replace_embedding(model: PagedModel, tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = rows = torch.randn_like(tensors["model.embed_tokens.weight"])
    model.replacements.set_rows(SLOT, EMBEDDING_GROUP, rows, None)


def _replace_head(model: PagedModel, tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = rows = torch.randn_like(tensors["lm_head.weight"])
    model.replacements.set_rows(SLOT, HEAD_GROUP, rows, None)


def _replace_tokens(model: PagedModel, tensors: dict[str, Tensor]) -> None:
    token_ids = torch.tensor([301, 5, 99])
    for group, name in ((EMBEDDING_GROUP, "model.embed_tokens.weight"), (HEAD_GROUP, "lm_head.weight")):
        rows = torch.randn(3, tensors[name].shape[1])
        tensors[name][token_ids] = rows
        model.replacements.set_rows(SLOT, group, rows, token_ids)


def _adapt_embedding(model: PagedModel, tensors: dict[str, Tensor]) -> None:
    vocabulary, width = tensors["model.embed_tokens.weight"].shape
    a, b = torch.randn(vocabulary, 5), torch.randn(5, width)
    g, c = 0.5 + torch.rand(width), torch.randn(width)
    model.table.set_module(SLOT, 0, EMBEDDING_GROUP, 0, a, b, 0.25, g, c)
    tensors["model.embed_tokens.weight"] = g * (tensors["model.embed_tokens.weight"] + 0.25 * a @ b) + c


def _adapt_head(model: PagedModel, tensors: dict[str, Tensor]) -> None:
    vocabulary, width = tensors["lm_head.weight"].shape
    a, b = torch.randn(5, width), torch.randn(5, vocabulary)
    g = 0.5 + torch.rand(vocabulary)
    model.table.set_module(SLOT, 0, HEAD_GROUP, 0, a, b, 0.1, g)
    tensors["lm_head.weight"] = g[:, None] * (tensors["lm_head.weight"] + 0.1 * b.T @ a)


CHANGES = [_replace_norms, _replace_embedding, _replace_head, _replace_tokens, _adapt_embedding, _adapt_head]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changed_rows_equal_a_base_with_the_change_and_others_do_not_notice(
    llama_base: Path, tmp_path: Path, change: Change, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model = load_paged(llama_base)
    tensors = load_file(llama_base / "model.safetensors")
    _adapt_key(model, tensors)
    change(model, tensors)
    if dtype is torch.float64:
        model = _widen(model, load_paged(llama_base, torch.float64))
    own, base = model.step((model.start(PROMPT, slot=SLOT), len(PROMPT)), (model.start(PROMPT), len(PROMPT)))
    alone = model.step((model.start(PROMPT), len(PROMPT)))[0]
    assert torch.equal(base, alone) if dtype is torch.float32 else torch.allclose(base, alone, atol=1e-9)
    assert (own - base).abs().max() > 0.1
    changed = reference_logits(load_reference(_write(tensors, llama_base, tmp_path / "changed")), PROMPT)
    assert (own - changed).abs().max() < TOLERANCE


def test_changes_in_chunks_equal_one_pass(llama_base: Path) -> None:
    torch.manual_seed(1)
    model = load_paged(llama_base)
    tensors = load_file(llama_base / "model.safetensors")
    _adapt_key(model, tensors)
    _replace_norms(model, tensors)
    _replace_tokens(model, tensors)
    _adapt_embedding(model, tensors)
    (whole,) = model.step((model.start(PROMPT, slot=SLOT), len(PROMPT)))
    request = model.start(PROMPT, slot=SLOT)
    parts = [model.step((request, count))[0] for count in (1, 6, 1, 3, 8, 1, 1)]
    assert torch.equal(torch.cat(parts), whole)


def _widen(model: PagedModel, wide: PagedModel) -> PagedModel:
    """The same slot in a float64 model."""
    for place, module in model.table._modules[SLOT].items():
        own = [None if t is None else t.double() for t in (module.a, module.b, module.g, module.c)]
        wide.table.set_module(SLOT, *place, *own[:2], module.scaling, *own[2:])
    for path, gain in model.replacements._norms[SLOT].items():
        wide.replacements.set_norm(SLOT, path, gain.double())
    for group, own_rows in model.replacements._rows[SLOT].items():
        wide.replacements.set_rows(SLOT, group, own_rows.rows.double(), own_rows.token_ids)
    return wide


def _write(tensors: dict[str, Tensor], base: Path, folder: Path) -> Path:
    shutil.copytree(base, folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
