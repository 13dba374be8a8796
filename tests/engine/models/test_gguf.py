"""GGUF files against what `transformers` makes of them, and what is refused by name."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from loraplex_engine.bases import gguf_convert, gguf_reader
from loraplex_engine.bases.folder import load_marker, load_spec
from loraplex_engine.bases.gguf_file import gguf_name
from loraplex_engine.bases.pull import pull
from loraplex_engine.errors import BaseUnavailableError, BaseUnsupportedError
from loraplex_engine.weights.index import hash_tensors, read_index
from loraplex_engine.weights.source import WeightSource
from support import CHAT_TEMPLATE, build_tokenizer, tiny_llama_config, write_base

CONFIG = tiny_llama_config(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, vocab_size=320)
TEXTS = ("The parcel left.", "naïve façade 東京 🙂", "  two  spaces\n\tand lines", "<|im_start|>user\nHi<|im_end|>\n")


class GgufMaker:
    """Writes the tiny base as llama.cpp's converter would, with room for faults."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.architecture = "llama"
        self.pre = "smollm"
        self.tokenizer_model = "gpt2"
        self.kind = GGMLQuantizationType.Q8_0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}

    def write(self, file: Path) -> Path:
        writer = GGUFWriter(file, self.architecture)
        self._add_metadata(writer)
        self._add_tokenizer(writer)
        source = WeightSource(self.base)
        for name in read_index(self.base):
            data = _permuted(name, source.read(name, torch.float32).numpy())
            kind = self.kind if data.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(gguf_name(name), quantize(data, kind), raw_dtype=kind)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    def _add_metadata(self, writer: GGUFWriter) -> None:
        writer.add_context_length(CONFIG["max_position_embeddings"])
        writer.add_embedding_length(CONFIG["hidden_size"])
        writer.add_block_count(CONFIG["num_hidden_layers"])
        writer.add_feed_forward_length(CONFIG["intermediate_size"])
        writer.add_head_count(CONFIG["num_attention_heads"])
        writer.add_head_count_kv(CONFIG["num_key_value_heads"])
        writer.add_rope_dimension_count(CONFIG["head_dim"])
        writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
        writer.add_rope_freq_base(CONFIG["rope_theta"])
        writer.add_vocab_size(CONFIG["vocab_size"])
        for key, value in self.metadata.items():
            writer.add_key_value(key, value, _value_type(value))

    def _add_tokenizer(self, writer: GGUFWriter) -> None:
        content = json.loads(build_tokenizer().to_str())
        tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
        tokens += [f"[PAD{index}]" for index in range(len(tokens), CONFIG["vocab_size"])]
        special = {token["content"] for token in content["added_tokens"]}
        writer.add_tokenizer_model(self.tokenizer_model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types([_token_type(token, special) for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)


def _value_type(value: Any) -> Any:
    return {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32, int: GGUFValueType.UINT32}[type(value)]


def _token_type(token: str, special: set[str]) -> int:
    if token in special:
        return TokenType.CONTROL
    return TokenType.UNUSED if token.startswith("[PAD") else TokenType.NORMAL


def _permuted(name: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to the rows of q and k."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return data
    count = CONFIG[heads]
    return data.reshape(count, 2, len(data) // count // 2, -1).swapaxes(1, 2).reshape(data.shape)


@pytest.fixture
def maker(tmp_path: Path) -> GgufMaker:
    return GgufMaker(write_base(tmp_path / "base", CONFIG))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1", "Q5_0"])
def test_weights_equal_transformers_to_the_bit(maker: GgufMaker, tmp_path: Path, kind: str) -> None:
    maker.kind = GGMLQuantizationType[kind]
    file = maker.write(tmp_path / "tiny.gguf")
    ours = WeightSource(pull(str(file), tmp_path / "cache"))
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    expected = reference.state_dict()
    assert set(expected) == set(read_index(maker.base))
    assert all(torch.equal(ours.get(name), tensor) for name, tensor in expected.items())
    if kind == "F32":
        original = WeightSource(maker.base)
        assert all(torch.equal(ours.get(name), original.get(name)) for name in expected)


def test_the_base_is_the_same_as_the_folder_it_was_made_from(maker: GgufMaker, tmp_path: Path) -> None:
    maker.kind = GGMLQuantizationType.F32
    from_file = load_spec(pull(str(maker.write(tmp_path / "Tiny-Llama.Q4_1.gguf")), tmp_path / "cache"))
    from_folder = load_spec(pull(str(maker.base), tmp_path / "other"))
    assert from_file.fingerprint == from_folder.fingerprint
    assert from_file.weights_digest == from_folder.weights_digest
    assert (from_file.name, from_file.accepted_names) == ("tiny-llama-q4-1", ("Tiny-Llama.Q4_1", "Tiny-Llama"))


def test_recorded_hashes_are_those_of_the_written_file(maker: GgufMaker, tmp_path: Path) -> None:
    folder = pull(str(maker.write(tmp_path / "tiny.gguf")), tmp_path / "cache")
    assert load_marker(folder).tensors == hash_tensors(read_index(folder).values())


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_tokens_equal_transformers(maker: GgufMaker, tmp_path: Path, pre: str) -> None:
    maker.pre = pre
    file = maker.write(tmp_path / "tiny.gguf")
    ours = Tokenizer.from_file(str(pull(str(file), tmp_path / "cache") / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in (*TEXTS, "1234567 12", "don't I'LL"):
        assert ours.encode(text).ids == reference.encode(text)
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_smollm_cuts_digits_one_by_one(maker: GgufMaker, tmp_path: Path) -> None:
    file = maker.write(tmp_path / "tiny.gguf")
    ours = Tokenizer.from_file(str(pull(str(file), tmp_path / "cache") / "tokenizer.json"))
    # transformers does not know this rule; on text without digits it cuts alike
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert all(ours.encode(text).ids == reference.encode(text) for text in TEXTS)
    assert ours.encode("0123456789").tokens == list("0123456789")
    assert len(build_tokenizer().encode("0123456789").tokens) < 10


def test_transformers_reads_the_written_tokenizer_alike(maker: GgufMaker, tmp_path: Path) -> None:
    folder = pull(str(maker.write(tmp_path / "tiny.gguf")), tmp_path / "cache")
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(folder)
    assert (reference.bos_token_id, reference.eos_token_id, reference.pad_token_id) == (1, 2, 0)
    for text in (*TEXTS, "in 2026"):
        assert reference.encode(text) == ours.encode(text).ids
    rendered = reference.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_beginning_token_is_put_first_where_the_file_says_so(maker: GgufMaker, tmp_path: Path) -> None:
    file = maker.write(tmp_path / "tiny.gguf")
    plain = Tokenizer.from_file(str(pull(str(file), tmp_path / "cache") / "tokenizer.json"))
    data = bytearray(file.read_bytes())
    key = b"tokenizer.ggml.add_bos_token"
    data[data.index(key) + len(key) + 4] = 1
    changed = tmp_path / "with-bos.gguf"
    changed.write_bytes(data)
    begun = Tokenizer.from_file(str(pull(str(changed), tmp_path / "cache") / "tokenizer.json"))
    assert begun.encode("Hi").ids == [1, *plain.encode("Hi").ids]
    assert begun.encode("Hi", add_special_tokens=False).ids == plain.encode("Hi").ids


def test_linear_rope_scaling_is_read(maker: GgufMaker, tmp_path: Path) -> None:
    maker.metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = pull(str(maker.write(tmp_path / "tiny.gguf")), tmp_path / "cache")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "qwen2"}, "'qwen2'"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, "experts"),
    "rope": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "'yarn'"),
    "rope factors": ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope_freqs.weight"),
    "tensor": ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "blk.0.attn_q.bias"),
    "tokenizer": ({"tokenizer_model": "llama"}, "'llama'"),
    "cut": ({"pre": "mystery"}, "'mystery'"),
    "count": ({"metadata": {"llama.attention.key_length": "many"}}, "'many', which is no count"),
    "nothing": ({"metadata": {"llama.attention.key_length": 0}}, "'0', which is no count"),
    "number": ({"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "x"}}, "no number"),
    "no factor": ({"metadata": {"llama.rope.scaling.type": "linear"}}, "lacks the key llama.rope.scaling.factor"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_read_is_refused_by_name(maker: GgufMaker, tmp_path: Path, name: str) -> None:
    fault, named = FAULTS[name]
    for key, value in fault.items():
        setattr(maker, key, value)
    with pytest.raises(BaseUnsupportedError, match=named):
        pull(str(maker.write(tmp_path / "tiny.gguf")), tmp_path / "cache")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 0.999])
def test_a_cut_file_is_refused(maker: GgufMaker, tmp_path: Path, share: float) -> None:
    file = maker.write(tmp_path / "tiny.gguf")
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(BaseUnsupportedError, match="not a whole GGUF file"):
        pull(str(file), tmp_path / "cache")


@pytest.mark.parametrize("kind", [GGUFValueType.UINT8, GGUFValueType.ARRAY])
def test_a_length_beyond_the_end_is_refused_at_once(tmp_path: Path, kind: GGUFValueType) -> None:
    key = b"general.x"
    array = struct.pack("<IIQ", GGUFValueType.ARRAY, kind, 1 << 62)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + array)
    with pytest.raises(BaseUnsupportedError, match="it ends at byte 57"):
        pull(str(file), tmp_path / "cache")


def test_a_file_of_too_many_parts_is_refused(maker: GgufMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_reader, "_MAX_PARTS", 100)
    with pytest.raises(BaseUnsupportedError, match="more than 100 parts"):
        pull(str(maker.write(tmp_path / "tiny.gguf")), tmp_path / "cache")


def test_a_full_disk_is_told_before_the_work(maker: GgufMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = maker.write(tmp_path / "tiny.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(gguf_convert.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(BaseUnavailableError, match="LORAPLEX_CACHE_DIR"):
        pull(str(file), tmp_path / "cache")
