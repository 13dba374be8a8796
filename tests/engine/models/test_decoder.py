"""The forward pass against `transformers`, whole, in chunks, in company, and with adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex_engine.core.module_group import LAYER_GROUPS
from support_models import PagedModel, load_paged, load_reference, reference_logits

TOLERANCE = 1e-4
LOOSE = 1e-3
REAL_GAP, BF16_GAP = 2e-3, 0.25
PROMPT = [3, 17, 301, 44, 5, 5, 208, 90, 11, 63, 127, 2, 256, 8, 19, 77, 33, 150, 4, 9, 61]
OTHER = [12, 250, 7, 7, 99, 180, 41]


def _largest_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return (ours - reference).abs().max().item()


def _assert_same_top1(ours: torch.Tensor, reference: torch.Tensor, gap: float) -> None:
    top = reference.topk(2, dim=-1)
    is_clear = (top.values[:, 0] - top.values[:, 1]) > gap
    assert is_clear.any()
    assert torch.equal(ours.argmax(-1)[is_clear], top.indices[is_clear, 0])


def test_logits_equal_transformers(hf_base: Path) -> None:
    model = load_paged(hf_base)
    (ours,) = model.step((model.start(PROMPT), len(PROMPT)))
    reference = reference_logits(load_reference(hf_base), PROMPT)
    assert reference.std() > 0.3
    assert _largest_difference(ours, reference) < TOLERANCE


def test_chunks_through_the_cache_equal_one_pass(hf_base: Path) -> None:
    model = load_paged(hf_base)
    (whole,) = model.step((model.start(PROMPT), len(PROMPT)))
    request = model.start(PROMPT)
    parts = [model.step((request, count))[0] for count in (1, 6, 1, 3, 8, 1, 1)]
    assert _largest_difference(torch.cat(parts), whole) < TOLERANCE


def test_requests_in_one_step_do_not_see_one_another(hf_base: Path) -> None:
    model = load_paged(hf_base)
    first, second = model.start(PROMPT), model.start(OTHER)
    start, other_start = model.step((first, 9), (second, 4))
    other_rest, rest = model.step((second, 3), (first, 12))
    reference = load_reference(hf_base)
    assert _largest_difference(torch.cat((start, rest)), reference_logits(reference, PROMPT)) < TOLERANCE
    assert _largest_difference(torch.cat((other_start, other_rest)), reference_logits(reference, OTHER)) < TOLERANCE


def test_a_shortened_decoder_is_the_base_with_fewer_layers(llama_base: Path) -> None:
    model, reference = load_paged(llama_base), load_reference(llama_base)
    model.decoder = model.decoder.shortened(2)
    model.cache.k, model.cache.v = model.cache.k[:2], model.cache.v[:2]
    (ours,) = model.step((model.start(PROMPT), len(PROMPT)))
    assert len(reference.model.layers) > 2
    reference.model.layers = reference.model.layers[:2]
    assert _largest_difference(ours, reference_logits(reference, PROMPT)) < TOLERANCE


def test_float64_is_served_as_ground_truth(llama_base: Path) -> None:
    model = load_paged(llama_base, torch.float64)
    (ours,) = model.step((model.start(PROMPT), len(PROMPT)))
    assert ours.dtype is torch.float64
    # transformers rounds norms and softmax to float32 even in a float64 model
    reference = load_reference(llama_base, torch.float64)(torch.tensor([PROMPT])).logits[0]
    assert _largest_difference(ours, reference) < 1e-5


def test_bfloat16_keeps_clear_choices(hf_base: Path) -> None:
    model = load_paged(hf_base, torch.bfloat16)
    (ours,) = model.step((model.start(PROMPT), len(PROMPT)))
    assert ours.dtype is torch.bfloat16
    _assert_same_top1(ours, reference_logits(load_reference(hf_base), PROMPT), BF16_GAP)


def test_a_step_calls_four_linears_a_layer_whatever_the_mix(llama_base: Path) -> None:
    model = load_paged(llama_base)
    _set_random_adapter(model, slot=1, rank=4)
    plain, adapted = model.start(PROMPT), model.start(OTHER, slot=1)
    before = model.decoder.base_gemm_calls
    model.step((plain, 5))
    alone = model.decoder.base_gemm_calls - before
    model.step((plain, 3), (adapted, 4))
    assert alone == 4 * model.decoder.config.num_layers
    assert model.decoder.base_gemm_calls - before == 2 * alone


def test_adapter_equals_the_merged_base(llama_base: Path, tmp_path: Path) -> None:
    model = load_paged(llama_base)
    merged = _merged_base(llama_base, tmp_path / "merged", _set_random_adapter(model, slot=2, rank=5))
    adapted, plain = model.start(PROMPT, slot=2), model.start(PROMPT)
    ours, base = model.step((adapted, len(PROMPT)), (plain, len(PROMPT)))
    assert _largest_difference(ours, base) > 0.1
    assert _largest_difference(ours, reference_logits(load_reference(merged), PROMPT)) < TOLERANCE
    assert _largest_difference(base, reference_logits(load_reference(llama_base), PROMPT)) < TOLERANCE


def test_smollm2_equals_transformers(smollm2_base: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_base / "tokenizer.json"))
    prompt = tokenizer.encode("<|im_start|>user\nWhat is 27 plus 15?<|im_end|>\n<|im_start|>assistant\n").ids
    model = load_paged(smollm2_base, block_size=16, num_blocks=13)
    request = model.start(prompt)
    ours = torch.cat([model.step((request, 10))[0], *(model.step((request, 1))[0] for _ in prompt[10:])])
    reference = reference_logits(load_reference(smollm2_base), prompt)
    assert _largest_difference(ours, reference) < LOOSE
    _assert_same_top1(ours, reference, REAL_GAP)


Deltas = dict[str, torch.Tensor]


def _set_random_adapter(model: PagedModel, slot: int, rank: int) -> Deltas:
    """Fill a slot for every linear of every layer; returns what each base weight gains."""
    folder = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}
    torch.manual_seed(slot)
    deltas: Deltas = {}
    for layer in range(model.decoder.config.num_layers):
        for group, leaves in LAYER_GROUPS.items():
            shape = model.table.shapes[group]
            for index, leaf in enumerate(leaves):
                a = 0.2 * torch.randn(rank, shape.in_features).to(model.table.dtype)
                b = 0.2 * torch.randn(rank, shape.out_features[index]).to(model.table.dtype)
                model.table.set_module(slot, layer, group, index, a, b, 0.5)
                deltas[f"model.layers.{layer}.{folder[group]}.{leaf}.weight"] = 0.5 * (b.T @ a)
    return deltas


def _merged_base(base: Path, folder: Path, deltas: Deltas) -> Path:
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    assert deltas.keys() <= tensors.keys()
    save_file({name: tensor + deltas.get(name, 0) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_have_the_bits_of_single_ops(hf_base: Path, dtype: torch.dtype) -> None:
    fused, composed = load_paged(hf_base, dtype), load_paged(hf_base, dtype)
    if fused.decoder.fused is None:
        pytest.skip("this machine has no native form of every part of a layer")
    composed.decoder.fused = None
    outputs = []
    for model in (fused, composed):
        _set_random_adapter(model, slot=1, rank=4)
        plain, adapted = model.start(PROMPT), model.start(OTHER, slot=1)
        prefill = model.step((plain, 5), (adapted, len(OTHER)))
        outputs.append([*prefill, *model.step((plain, len(PROMPT) - 5))])
        assert model.decoder.base_gemm_calls == 2 * 4 * len(model.decoder.layers)
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
