"""The test helpers themselves: what they write is what the tools of the field read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import ALL_TARGETS, IM_END, write_adapter


def test_transformers_loads_each_tiny_base_without_missing_or_unexpected_weights(tiny_base: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(tiny_base, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info


def test_tokenizer_of_a_tiny_base_applies_its_chat_template(tiny_base: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    messages = [{"role": "user", "content": "Grüße 🙂"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"<|im_start|>user\nGrüße 🙂{IM_END}\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_loads_a_written_adapter_and_it_moves_the_logits(tiny_base: Path, tmp_path: Path, dtype: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = write_adapter(
        tmp_path / "a", tiny_base, rank=4, targets=ALL_TARGETS, rank_pattern={"q_proj": 16}, dtype=dtype
    )
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    ids = torch.tensor([[1, 5, 9, 17]])
    with torch.no_grad():
        plain = base(ids).logits
        tuned = PeftModel.from_pretrained(base, folder)(ids).logits
    assert (plain - tuned).abs().max() > 0.1
