"""Builds `tokenizer.json` and `tokenizer_config.json` from the metadata of a GGUF file.

Byte-level BPE only. `tokenizer.ggml.pre` says how text is cut before merging; a value that is not in the table below is
refused, because a wrong cut gives other tokens without any error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from loraplex_engine.bases.gguf_file import GgufFile
from loraplex_engine.errors import BaseUnsupportedError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the file describes.

    Raises:
        BaseUnsupportedError: another kind of tokenizer, or a cut (`tokenizer.ggml.pre`) that we do not know.
    """
    pre = _pre_tokenizer_name(file)
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    vocab = {token: index for index, token in enumerate(tokens) if kinds[index] != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=_PRE_TOKENIZERS[pre] is _llama3))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, kinds)
    if file.get("tokenizer.ggml.add_bos_token", False):
        _begin_with(tokenizer, tokens[file.get("tokenizer.ggml.bos_token_id")])
    return tokenizer


def build_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The settings beside the tokenizer: special tokens, chat template, length."""
    tokens = file.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.get("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _SPECIAL_KEYS.items():
        index = file.get(f"tokenizer.ggml.{key}")
        if index is not None:
            config[name] = tokens[index]
    if template := file.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _pre_tokenizer_name(file: GgufFile) -> str:
    model = file.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise BaseUnsupportedError(
            f"{file.name} has a tokenizer of kind {model!r}; from GGUF only byte-level BPE ('gpt2') is read. "
            "Pull the model's Hugging Face folder instead."
        )
    pre = str(file.get("tokenizer.ggml.pre", "without a name"))
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise BaseUnsupportedError(f"{file.name} cuts text by the rule {pre!r}, which is not known; known are {known}.")
    return pre


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    def of_kind(kind: int) -> list[AddedToken]:
        special = kind == _CONTROL
        found = (token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind)
        return [AddedToken(token, normalized=False, special=special) for token in found]

    tokenizer.add_special_tokens(of_kind(_CONTROL))
    tokenizer.add_tokens(of_kind(_USER_DEFINED))


def _begin_with(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
