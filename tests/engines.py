"""Engines for tests: the real core in this process, with adapters from folders, and PEFT as the judge.

`FolderLoader` packs through the loader's own code, at once and without a registry; everything else is what serves.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_start import find_once
from loraplex_engine.config import EngineConfig
from loraplex_engine.core.request import Request
from loraplex_engine.engine import Engine
from loraplex_engine.loop.assembly import build_engine
from loraplex_engine.lora.base_weights import BaseWeights
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.lora.packed import LoadFailed, PackedAdapter, map_packed
from loraplex_engine.lora.worker import load
from loraplex_engine.wire.messages import SamplingParams, TokenEvent
from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.wire.digest import artifact_path

_ids = itertools.count()
_SMALL = {"dtype": "float32", "kv_cache_memory_bytes": 128 << 20, "cpu_threads": 1}
QV = ["q_proj", "v_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SEVEN = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

KINDS: dict[str, dict[str, Any]] = {
    "r4": {"r": 4, "lora_alpha": 4, "target_modules": QV},
    "r8_seven": {"r": 8, "lora_alpha": 16, "target_modules": SEVEN},
    "r16_rslora": {"r": 16, "lora_alpha": 16, "target_modules": ATTENTION, "use_rslora": True},
    "r64_seven": {"r": 64, "lora_alpha": 64, "target_modules": SEVEN},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": SEVEN,
        "rank_pattern": {"v_proj": 16, "layers.1.self_attn.q_proj": 32, "down_proj": 4},
        "alpha_pattern": {"v_proj": 8, "^model.layers.0.mlp.up_proj": 32},
    },
    "k_only": {"r": 8, "lora_alpha": 16, "target_modules": ["k_proj"]},
    "gate_only": {"r": 32, "lora_alpha": 32, "target_modules": ["gate_proj"]},
    "one_layer": {"r": 8, "lora_alpha": 16.5, "target_modules": SEVEN, "layers_to_transform": [1]},
    "regex": {"r": 8, "lora_alpha": 16, "target_modules": r".*layers\.1\..*(q|k)_proj"},
    "r1": {"r": 1, "lora_alpha": 32, "target_modules": QV},
}
"""Adapter kinds that are served: ranks 1 to 64, every subset's shape, rsLoRA, patterns, single layers, regex."""

INVOCATION = [260, 314, 253]
"""Tokens that invoke the aLoRA kinds."""

SPECIAL_KINDS: dict[str, dict[str, Any]] = {
    "dora": {"r": 8, "lora_alpha": 16, "target_modules": SEVEN, "use_dora": True},
    "dora_rslora_patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj", "down_proj"],
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"up_proj": 16},
    },
    "lora_bias": {"r": 8, "lora_alpha": 16, "target_modules": SEVEN, "lora_bias": True},
    "bias_all": {"r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "down_proj"], "bias": "all"},
    "bias_lora_only": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
    "dora_bias": {"r": 8, "lora_alpha": 16, "target_modules": QV, "use_dora": True, "bias": "all"},
    "head": {"r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "lm_head"]},
    "embedding": {"r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "embed_tokens"]},
    "both_ends": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "k_proj"], "use_rslora": True},
    "saved_head": {"r": 8, "lora_alpha": 16, "target_modules": QV, "modules_to_save": ["lm_head"]},
    "saved_embedding": {"r": 8, "lora_alpha": 16, "target_modules": QV, "modules_to_save": ["embed_tokens"]},
    "saved_norms": {"r": 8, "lora_alpha": 16, "target_modules": QV, "modules_to_save": ["norm"]},
    "saved_layernorm": {"r": 8, "lora_alpha": 16, "target_modules": SEVEN, "modules_to_save": ["input_layernorm"]},
    "tokens": {"r": 8, "lora_alpha": 16, "target_modules": QV, "trainable_token_indices": [281, 28, 264]},
    "alora": {"r": 16, "lora_alpha": 32, "target_modules": SEVEN, "alora_invocation_tokens": INVOCATION},
    "everything": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": [*SEVEN, "embed_tokens"],
        "use_dora": True,
        "modules_to_save": ["lm_head", "norm"],
    },
}
"""Adapter kinds that change more than the product of A and B in linears."""


class FolderLoader:
    """Loads adapters that were put into its folder, one at each `take_finished`."""

    def __init__(self, root: Path, base: Path, spec: BaseSpec, dtype: str) -> None:
        self.root = root
        self.spec = spec
        self._disk = AdapterDisk(root, spec, None)
        self._base = BaseWeights(base, spec, dtype)
        self._waiting: list[str] = []

    def start(self, digest: str) -> None:
        self._waiting.append(digest)

    def take_finished(self) -> list[PackedAdapter | LoadFailed]:
        if not self._waiting:
            return []
        result = load(self._waiting.pop(0), self._disk, self._base)
        return [result if isinstance(result, LoadFailed) else map_packed(*result)]

    def put(self, folder: Path) -> str:
        """Make a PEFT folder loadable; returns its digest."""
        files = {file.name: file for file in folder.iterdir() if file.name != "README.md"}
        report, plan = check_adapter(files, self.spec)
        assert plan is not None, report
        target = self.root / artifact_path(plan.digest)
        if not target.exists():
            shutil.copytree(folder, target)
        return plan.digest


class EngineWorld:
    """An engine on one base with a folder of adapters."""

    def __init__(self, base: Path, cache: Path, **settings: Any) -> None:
        config = EngineConfig(base=str(base), cache_dir=str(cache), **{**_SMALL, **settings})
        loaders: list[FolderLoader] = []

        def build_loader(spec: BaseSpec, dtype: str) -> FolderLoader:
            limited = msgspec.structs.replace(spec, max_lora_rank=config.max_lora_rank)
            loaders.append(FolderLoader(cache / "adapters", base, limited, dtype))
            return loaders[0]

        with find_once():
            self.engine: Engine = build_engine(config, build_loader)
        self.loader = loaders[0]

    def put(self, folder: Path) -> str:
        """Make a PEFT folder loadable; returns its digest."""
        return self.loader.put(folder)

    def request(self, prompt: list[int], digest: str | None = None, max_tokens: int = 32, **params: Any) -> Request:
        sampling = SamplingParams(max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})
        return Request(f"r{next(_ids)}", prompt, sampling, digest)

    def score(self, rows: list[tuple[list[int], str | None]]) -> list[Tensor]:
        """Logits of every position, all rows in one batch."""
        requests = [
            Request(f"s{next(_ids)}", ids, SamplingParams(0), digest, wants_logits=True) for ids, digest in rows
        ]
        return self.engine.score(requests)

    def run(self, requests: list[Request]) -> dict[str, list[TokenEvent]]:
        """Add the requests and step until they have ended; events by request id."""
        for request in requests:
            self.engine.add(request)
        return self.finish([request.request_id for request in requests])

    def finish(self, request_ids: list[str]) -> dict[str, list[TokenEvent]]:
        events: dict[str, list[TokenEvent]] = {request_id: [] for request_id in request_ids}
        open_ids = set(request_ids)
        for _ in range(20_000):
            for event in self.engine.step():
                events.setdefault(event.request_id, []).append(event)
                if event.finish:
                    open_ids.discard(event.request_id)
            if not open_ids:
                self.engine.check_integrity()
                return events
            if not self.engine.has_running:
                # something is waited for: a load, or the grammar of a request
                time.sleep(0.001)
        raise AssertionError(f"requests did not end: {open_ids}")


def text_ids(events: list[TokenEvent]) -> list[int]:
    """All token ids of a request's events."""
    return [token for event in events for token in event.token_ids]


class PeftJudge:
    """The base in transformers with any number of random adapters on it, in float32."""

    def __init__(self, base: Path, kinds: dict[str, dict[str, Any]], out: Path, *, std: float) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model: PeftModel | None = None
        for seed, (name, fields) in enumerate(kinds.items()):
            config = LoraConfig(task_type="CAUSAL_LM", **fields)
            if self.model is None:
                self.model = get_peft_model(model, config, adapter_name=name)
            else:
                self.model.add_adapter(name, config)
            self._fill(name, seed, std)
        assert self.model is not None
        self.model.eval()
        for name in kinds:
            self.model.save_pretrained(out, selected_adapters=[name], save_embedding_layers=False)
        self.folders = {name: out / name for name in kinds}

    def _fill(self, name: str, seed: int, std: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for path, parameter in self.model.named_parameters():  # type: ignore[union-attr]
            if f".{name}." in path:
                parameter.data = torch.randn(parameter.shape, generator=generator) * std

    @torch.inference_mode()
    def logits(self, ids: list[int], name: str | None) -> Tensor:
        """float32 [len(ids), V] of one adapter, or of the base."""
        assert self.model is not None
        inputs = torch.tensor([ids])
        if name is None:
            with self.model.disable_adapter():
                return self.model(input_ids=inputs).logits[0]
        self.model.set_adapter(name)
        return self.model(input_ids=inputs).logits[0]

    @torch.inference_mode()
    def logits_of(self, ids_list: list[list[int]], name: str | None) -> list[Tensor]:
        """As `logits` for each prompt, all in one pass: no token looks at what fills up a row behind it."""
        assert self.model is not None
        inputs = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in ids_list], batch_first=True)
        if name is not None:
            self.model.set_adapter(name)
        with self.model.disable_adapter() if name is None else contextlib.nullcontext():
            found = self.model(input_ids=inputs).logits
        return [logits[: len(ids)] for logits, ids in zip(found, ids_list, strict=True)]


class SavedJudge:
    """The base in transformers with each adapter as PEFT reads it back from its own folder."""

    def __init__(self, base: Path, kinds: dict[str, dict[str, Any]], out: Path, *, std: float) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._read: dict[str, PeftModel] = {}
        self.folders = {name: out / name for name in kinds}
        for seed, (name, fields) in enumerate(kinds.items()):
            with _quiet():
                model = get_peft_model(self._copy(), LoraConfig(task_type="CAUSAL_LM", **fields))
                _train(model, seed, std)
                model.save_pretrained(out / name)

    def _copy(self) -> Any:
        """The base once more, but for its matrices, which PEFT leaves alone: where it trains one, it trains a copy."""
        matrices = {id(matrix): matrix for matrix in self._base.parameters() if matrix.ndim > 1}
        return copy.deepcopy(self._base, matrices)

    @torch.inference_mode()
    def logits(self, ids_list: list[list[int]], name: str) -> list[Tensor]:
        """float32 [len(ids), V] of one adapter for each prompt."""
        if name not in self._read:
            with _quiet():
                self._read[name] = PeftModel.from_pretrained(self._copy(), self.folders[name]).eval()
        return [self._read[name](input_ids=torch.tensor([ids])).logits[0] for ids in ids_list]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PEFT warns of tied heads and of the shapes of lora_bias, which are meant here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _train(model: PeftModel, seed: int, std: float) -> None:
    """Give what training would change other values: LoRA factors of its own, the rest near what it was."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            is_factor = ".lora_A." in path or ".lora_B." in path or ".lora_embedding_" in path
            spread = 2 * std * max(float(parameter.pow(2).mean().sqrt()), 0.05)
            parameter.data = noise * std if is_factor else parameter.data + noise * spread


def assert_logits_close(ours: Tensor, reference: Tensor, *, atol: float, gap: float, name: str | None = None) -> None:
    """Within `atol` everywhere, and the same first choice wherever the reference's first two are `gap` apart."""
    difference = (ours - reference).abs().max().item()
    assert difference <= atol, f"{name}: logits differ by {difference:.2e}, allowed {atol:.0e}"
    top = reference.topk(2, dim=-1).values
    clear = top[:, 0] - top[:, 1] > gap
    assert torch.equal(ours.argmax(-1)[clear], reference.argmax(-1)[clear]), name


def assert_greedy_matches(ours: list[int], reference: Tensor, num_prompt: int, *, gap: float) -> int:
    """Check generated ids against teacher-forced reference logits; returns how many were compared.

    `reference` is [num_prompt + len(ours), V] for the prompt followed by `ours`; a difference is allowed only where the
    reference's first two choices are within `gap`.
    """
    for index, token in enumerate(ours):
        row = reference[num_prompt - 1 + index]
        if int(row.argmax()) != token:
            top = row.topk(2).values
            assert float(top[0] - top[1]) <= gap, f"token {index} is {token}, PEFT says {int(row.argmax())}"
            return index
    return len(ours)
