"""What an adapter becomes on its way to a slot, judged by float64 numpy and by the weights that PEFT merges.

The judge looks at what the step will use: `g * (W + s B A)` and `g * b + c` of what the bank has bound.
"""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loraplex_engine.bases.folder import load_spec
from loraplex_engine.bases.pull import pull
from loraplex_engine.core.module_group import EMBEDDING_GROUP, GROUP_NAMES, HEAD_GROUP, find_place
from loraplex_engine.lora import stored
from loraplex_engine.lora.bank import DeviceBank
from loraplex_engine.lora.base_weights import BaseUnreadableError, BaseWeights
from loraplex_engine.lora.disk import VerifiedAdapter
from loraplex_engine.lora.pack import UnservableAdapterError, pack
from loraplex_engine.lora.packed import ALIGNMENT, PackedAdapter, map_packed
from loraplex_engine.lora.stored import ShortFileError
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.decoder import lora_shapes
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.table import LoraTable
from loraplex_engine.weights.index import read_header
from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.spec import AdapterPlan, LoraModule, SavedTensor, TensorRef, TokenRows
from support import write_safetensors

Array = NDArray[np.float64]
SLOT = 1
Q, K, DOWN = (f"model.layers.1.{leaf}" for leaf in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"))
EMBED, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
SERVED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class World:
    """A tiny base with one slot to fill, and an adapter written tensor by tensor."""

    def __init__(self, base: Path, tmp_path: Path, dtype: str = "float32") -> None:
        self.folder, self.spec, self.dtype = base, load_spec(base), SERVED[dtype]
        self.weights = BaseWeights(base, self.spec, dtype)
        config = ModelConfig.from_hf(json.loads((base / "config.json").read_text()))
        table = LoraTable(3, config.num_layers, lora_shapes(config), 16, self.dtype)
        self.bank = DeviceBank(table, Replacements(3))
        self.base = load_file(base / "model.safetensors")
        self.file = tmp_path / "adapter_model.safetensors"
        self.tensors: dict[str, NDArray[np.float32]] = {}
        self._rng = np.random.default_rng(3)

    def add(self, name: str, *shape: int, mean: float = 0.0) -> TensorRef:
        """A random tensor of the adapter, which lies in the file after `bind`."""
        self.tensors[name] = (mean + 0.2 * self._rng.normal(size=shape)).astype(np.float32)
        return TensorRef(name, "F32", shape, 0, 0)

    def lora(self, path: str, rank: int = 4, *, dora: bool = False, bias: bool = False) -> LoraModule:
        """A module whose tensors are in the file; on an embedding A is [rank, vocabulary] as PEFT has it."""
        spec = self.spec.modules[path]
        is_embedding = spec.kind == "embedding"
        out, width = (spec.in_features, spec.out_features) if is_embedding else (spec.out_features, spec.in_features)
        a, b = self.add(f"{path}.a", rank, width), self.add(f"{path}.b", out, rank)
        magnitude = self.add(f"{path}.m", out, mean=1.0) if dora else None
        return LoraModule(path, rank, 0.7, a, b, magnitude, self.add(f"{path}.d", out) if bias else None)

    def plan(self, modules: Iterable[LoraModule] = (), **more: Any) -> AdapterPlan:
        """Write the file; returns a plan whose tensors point into it."""
        write_safetensors(self.file, self.tensors)
        found = {t.name: TensorRef(t.name, t.dtype, t.shape, t.start, t.stop) for t in read_header(self.file)}
        plan = AdapterPlan("sha256:x", "", {}, 16, (), 0, tuple(modules), **more)
        return _relocate(plan, found)

    def bind(self, plan: AdapterPlan) -> PackedAdapter:
        """Pack the plan and bind it to the slot."""
        adapter = map_packed(*pack(plan.digest, VerifiedAdapter(plan, self.file, 0.0, 0.0), self.weights))
        self.bank.bind(SLOT, adapter)
        return adapter

    def served(self, name: str) -> Array:
        """A tensor of the base or the adapter, rounded as the engine has it."""
        raw = self.base[name] if name in self.base else torch.from_numpy(self.tensors[name])
        rounded: Array = raw.to(self.dtype).double().numpy()
        return rounded

    def weight(self, path: str) -> Array:
        """W [O, K] of the base."""
        is_embedding = self.spec.modules[path].kind == "embedding"
        w = self.served(f"{EMBED if self.spec.modules[path].tied else path}.weight")
        return w.T if is_embedding else w

    def effect(self, path: str) -> tuple[Array, Array | float]:
        """Weight and bias that the slot's rows see at a module."""
        layer, group, slice_id = find_place(path) or pytest.fail(path)
        module = self.bank.table.find_module(SLOT, layer, GROUP_NAMES[group], slice_id)
        w = self.weight(path)
        b = self.served(f"{path}.bias") if f"{path}.bias" in self.base else 0.0
        if module is None:
            return w, b
        if module.a is not None and module.b is not None:
            a = module.a.T if group == GROUP_NAMES.index(EMBEDDING_GROUP) else module.a
            w = w + module.scaling * module.b.T.double().numpy() @ a.double().numpy()
        g = np.ones(len(w)) if module.g is None else module.g.double().numpy()
        c = 0.0 if module.c is None else module.c.double().numpy()
        return g[:, None] * w, g * b + c

    def write_base(self, folder: Path, *, without: str = "-") -> BaseWeights:
        """The base's tensors in a folder of their own, but for those with a part of the name."""
        folder.mkdir()
        tensors = {name: tensor.numpy() for name, tensor in self.base.items() if without not in name}
        write_safetensors(folder / "model.safetensors", tensors)
        return BaseWeights(folder, self.spec, self.weights.dtype)


def _relocate(plan: AdapterPlan, found: dict[str, TensorRef]) -> AdapterPlan:
    """The plan with the places at which its tensors came to lie."""

    def place(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return found[value.name]
        if isinstance(value, tuple):
            return tuple(place(item) for item in value)
        if isinstance(value, LoraModule | SavedTensor | TokenRows | AdapterPlan):
            return type(value)(*(place(getattr(value, field)) for field in value.__struct_fields__))
        return value

    placed: AdapterPlan = place(plan)
    return placed


@pytest.fixture(scope="module")
def bases(
    tiny_llama: Path, tiny_tied: Path, tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    cache = tmp_path_factory.mktemp("cache")
    return {base.name: pull(str(base), cache) for base in (tiny_llama, tiny_tied, tiny_qwen2)}


@pytest.fixture(params=["float32", "bfloat16"])
def qwen2(request: pytest.FixtureRequest, bases: dict[str, Path], tmp_path: Path) -> World:
    return World(bases["tiny-qwen2"], tmp_path, request.param)


@pytest.fixture
def tied(bases: dict[str, Path], tmp_path: Path) -> World:
    return World(bases["tiny-tied"], tmp_path)


def _norms(world: World, path: str) -> Array:
    """||W + s B A|| of each row, by building it."""
    a, b = world.served(f"{path}.a"), world.served(f"{path}.b")
    norms: Array = np.linalg.norm(world.weight(path) + 0.7 * b @ a, axis=1)
    return norms


@pytest.mark.parametrize("chunk", [1 << 18, 100])
@pytest.mark.parametrize("path", [Q, DOWN, EMBED, HEAD])
def test_dora_scales_each_row_to_its_magnitude(
    qwen2: World, path: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_CHUNK_ITEMS", chunk)
    qwen2.bind(qwen2.plan([qwen2.lora(path, dora=True)]))
    weight, bias = qwen2.effect(path)
    magnitude = qwen2.tensors[f"{path}.m"].astype(np.float64)
    assert np.linalg.norm(weight, axis=1) == pytest.approx(magnitude, rel=2e-7)
    assert bias == pytest.approx(qwen2.served(f"{path}.bias") if path == Q else 0.0, abs=1e-6)
    layer, group, slice_id = find_place(path) or pytest.fail(path)
    bound = qwen2.bank.table.find_module(SLOT, layer, GROUP_NAMES[group], slice_id)
    assert bound is not None
    assert bound.g is not None
    # 1e-7 is float32's rounding: the closed form itself errs far less
    assert bound.g.numpy() == pytest.approx(magnitude / _norms(qwen2, path), rel=1e-7)
    assert (bound.c is None) == (path != Q)


def test_dora_on_a_tied_head_takes_the_embedding_s_rows(tied: World) -> None:
    tied.bind(tied.plan([tied.lora(HEAD, dora=True)]))
    assert np.linalg.norm(tied.effect(HEAD)[0], axis=1) == pytest.approx(tied.tensors[f"{HEAD}.m"], rel=2e-7)


def test_dora_norm_survives_rows_that_almost_cancel(bases: dict[str, Path], tmp_path: Path) -> None:
    world = World(bases["tiny-llama"], tmp_path)
    module = world.lora(Q, rank=1, dora=True)
    w = world.base[f"{Q}.weight"].numpy()
    # row 5 of W + s B A is a thousandth of row 5 of W
    world.tensors[f"{Q}.a"] = w[5:6].copy()
    world.tensors[f"{Q}.b"][5] = -0.999 / 0.7
    world.bind(world.plan([module]))
    assert np.linalg.norm(world.effect(Q)[0], axis=1) == pytest.approx(world.tensors[f"{Q}.m"], rel=1e-6)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("path", "trained"), [(Q, False), (Q, True), (DOWN, False)])
def test_biases_stay_outside_the_scale(qwen2: World, path: str, dora: bool, trained: bool, own: bool) -> None:
    module = qwen2.lora(path, dora=dora, bias=own)
    biases = [SavedTensor(path, qwen2.add("trained", len(qwen2.weight(path))))] if trained else []
    qwen2.bind(qwen2.plan([module], biases=tuple(biases)))
    expected: Array = np.zeros(len(qwen2.weight(path)))
    if trained:
        expected = qwen2.tensors["trained"].astype(np.float64)
    elif path == Q:
        expected = qwen2.served(f"{path}.bias")
    if own:
        g = qwen2.tensors[f"{path}.m"] / _norms(qwen2, path) if dora else 1.0
        expected = expected + g * 0.7 * qwen2.tensors[f"{path}.d"]
    assert qwen2.effect(path)[1] == pytest.approx(expected, abs=1e-6)


def test_bias_alone_is_a_module_of_rank_0_and_leaves_the_weight_as_it_was(qwen2: World) -> None:
    saved = SavedTensor(K, qwen2.add("trained", len(qwen2.weight(K))))
    qwen2.bind(qwen2.plan([qwen2.lora(Q)], biases=(saved,)))
    weight, bias = qwen2.effect(K)
    assert np.array_equal(weight, qwen2.weight(K))
    assert bias == pytest.approx(qwen2.tensors["trained"], abs=1e-7)
    bound = qwen2.bank.table.find_module(SLOT, 1, "qkv", 1)
    assert bound is not None
    assert (bound.a, bound.rank, bound.g) == (None, 0, None)


def test_plain_lora_has_no_epilogue_even_where_the_base_has_a_bias(qwen2: World) -> None:
    qwen2.bind(qwen2.plan([qwen2.lora(Q)]))
    bound = qwen2.bank.table.find_module(SLOT, 1, "qkv", 0)
    assert bound is not None
    assert (bound.g, bound.c) == (None, None)


def test_embedding_s_a_lies_by_token(qwen2: World) -> None:
    qwen2.bind(qwen2.plan([qwen2.lora(EMBED)]))
    bound = qwen2.bank.table.find_module(SLOT, 0, EMBEDDING_GROUP, 0)
    assert bound is not None
    assert bound.a is not None
    assert np.array_equal(bound.a.double().numpy(), qwen2.served(f"{EMBED}.a").T)


def test_head_that_takes_its_lora_from_the_embedding_gets_the_transposed_product(tied: World) -> None:
    embed = tied.lora(EMBED)
    # a head's A is [rank, width], B [vocabulary, rank]: the embedding's B and A, each stored the other way round
    head = LoraModule(HEAD, embed.rank, embed.scaling, embed.b, embed.a, is_transposed=True)
    tied.bind(tied.plan([embed, head]))
    assert tied.effect(HEAD)[0] == pytest.approx(tied.effect(EMBED)[0].T, abs=1e-6)
    assert not np.allclose(tied.effect(HEAD)[0], tied.weight(HEAD))


def test_norms_and_matrices_and_rows_stand_in_place_of_the_base_s(qwen2: World) -> None:
    vocab, width = qwen2.base[f"{EMBED}.weight"].shape
    ids = (7, 330, 0)
    plan = qwen2.plan(
        [qwen2.lora(Q)],
        weights=(SavedTensor(NORM, qwen2.add("norm", width)), SavedTensor(HEAD, qwen2.add("head", vocab, width))),
        token_rows=(TokenRows(EMBED, ids, qwen2.add("rows", 3, width)),),
        invocation_ids=(4, 5),
    )
    adapter = qwen2.bind(plan)
    replacements = qwen2.bank.replacements
    assert np.array_equal(replacements.find_norms(NORM, [SLOT])[SLOT].double().numpy(), qwen2.served("norm"))
    head = replacements.find_rows(HEAD_GROUP, [SLOT])[SLOT]
    assert np.array_equal(head.rows.double().numpy(), qwen2.served("head"))
    assert head.token_ids is None
    rows = replacements.find_rows(EMBEDDING_GROUP, [SLOT])[SLOT]
    assert np.array_equal(rows.rows.double().numpy(), qwen2.served("rows"))
    assert rows.token_ids is not None
    assert rows.token_ids.tolist() == list(ids)
    assert adapter.facts.invocation_ids == (4, 5)


def test_a_tensor_that_replaces_embedding_and_head_is_packed_once_and_accounted_as_replaced(tied: World) -> None:
    vocab, width = tied.base[f"{EMBED}.weight"].shape
    ref = tied.add("both", vocab, width)
    module = tied.lora(Q)
    adapter = tied.bind(tied.plan([module], weights=(SavedTensor(EMBED, ref), SavedTensor(HEAD, ref))))
    matrix = 4 * vocab * width
    num_lora = sum(4 * 4 * size for size in tied.weight(Q).shape)
    assert matrix <= adapter.replaced_bytes < matrix + ALIGNMENT
    assert num_lora <= adapter.lora_bytes < num_lora + ALIGNMENT
    assert adapter.lora_bytes + adapter.replaced_bytes == adapter.facts.num_bytes
    found = [tied.bank.replacements.find_rows(group, [SLOT])[SLOT].rows for group in (EMBEDDING_GROUP, HEAD_GROUP)]
    assert found[0].data_ptr() == found[1].data_ptr()


def test_clearing_a_slot_gives_back_every_byte_of_the_adapter(tied: World) -> None:
    vocab, width = tied.base[f"{EMBED}.weight"].shape
    more = {
        "weights": (SavedTensor(NORM, tied.add("norm", width)), SavedTensor(HEAD, tied.add("head", vocab, width))),
        "token_rows": (TokenRows(EMBED, (3,), tied.add("rows", 1, width)),),
    }
    adapter = tied.bind(tied.plan([tied.lora(Q, dora=True, bias=True), tied.lora(EMBED)], **more))
    assert tied.bank.replacements.has_any([SLOT])
    tied.effect(Q)
    mapping = weakref.ref(adapter.buffer)
    del adapter
    gc.collect()
    assert mapping() is not None
    tied.bank.clear(SLOT)
    gc.collect()
    assert mapping() is None
    assert not tied.bank.replacements.has_any([SLOT])
    assert not tied.bank.table.occupied.any()


PEFT_KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "dora_bias": {"target_modules": ["q_proj", "k_proj"], "use_dora": True, "bias": "all"},
    "lora_bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "bias_lora_only": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "bias_all": {"target_modules": ["o_proj"], "bias": "all"},
    "patterns": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 16}, "use_rslora": True},
    "ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "dora_ends": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True},
}


# PEFT takes the bias of lora_bias for a shard of a matrix, and says so
@pytest.mark.filterwarnings("ignore:Adapter 'default'")
@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_every_linear_is_what_peft_merges(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    world = World(bases["tiny-qwen2"], tmp_path)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(world.folder, dtype=torch.float32),
        LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **PEFT_KINDS[kind]),
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    files = {file.name: file for file in (tmp_path / "peft").iterdir() if file.name != "README.md"}
    report, plan = check_adapter(files, world.spec)
    assert plan is not None, report
    world.file = files["adapter_model.safetensors"]
    world.bind(plan)
    merged = model.merge_and_unload().state_dict()
    for path, spec in world.spec.modules.items():
        if spec.kind == "norm":
            continue
        weight, bias = world.effect(path)
        truth = merged[f"{path}.weight"].double().numpy()
        close: dict[str, Any] = {"rtol": 0, "atol": 2e-6, "equal_nan": False, "err_msg": path}
        np.testing.assert_allclose(weight, truth.T if spec.kind == "embedding" else truth, **close)
        if f"{path}.bias" in merged:
            np.testing.assert_allclose(bias, merged[f"{path}.bias"].numpy(), **close)


@pytest.mark.parametrize("broken", ["zero norm", "huge magnitude", "two ways", "no place", "rows of a linear"])
def test_an_adapter_whose_numbers_cannot_be_served_is_to_blame_itself(
    bases: dict[str, Path], tmp_path: Path, broken: str
) -> None:
    world = World(bases["tiny-llama"], tmp_path)
    vocab, width = world.base[f"{EMBED}.weight"].shape
    module, more = world.lora(Q, rank=1, dora=True), {}
    if broken == "zero norm":
        world.base[f"{Q}.weight"][5], world.tensors[f"{Q}.b"][5] = 0.0, 0.0
        world.weights = world.write_base(tmp_path / "base")
    elif broken == "huge magnitude":
        world.tensors[f"{Q}.a"], world.tensors[f"{Q}.b"][5] = world.base[f"{Q}.weight"].numpy()[5:6], -0.999 / 0.7
        world.tensors[f"{Q}.m"][5] = 3e38
    elif broken == "two ways":
        rows = TokenRows(EMBED, (1,), world.add("rows", 1, width))
        more = {"weights": (SavedTensor(EMBED, world.add("e", vocab, width)),), "token_rows": (rows,)}
    elif broken == "no place":
        module = LoraModule("model.layers.0.self_attn.qkv_proj", 1, 1.0, module.a, module.b)
    else:
        more = {"weights": (SavedTensor(DOWN, world.add("w", 2, 2)),)}
    with pytest.raises(UnservableAdapterError):
        world.bind(world.plan([module], **more))


@pytest.mark.parametrize("fault", ["cut", "cut after it was opened", "gone", "no tensor"])
def test_a_base_that_cannot_be_read_any_more_is_its_own_fault(qwen2: World, tmp_path: Path, fault: str) -> None:
    plan = qwen2.plan([qwen2.lora(Q, dora=True)])
    qwen2.weights = qwen2.write_base(tmp_path / "base", without="bias" if fault == "no tensor" else "-")
    file = tmp_path / "base" / "model.safetensors"
    if fault == "gone":
        file.unlink()
    elif fault == "cut after it was opened":
        qwen2.weights.find_bias(Q)
        os.truncate(file, 9000)
    elif fault == "cut":
        os.truncate(file, 9000)
    with pytest.raises(BaseUnreadableError):
        qwen2.bind(plan)


def test_a_file_cut_after_it_was_verified_fails_and_leaves_the_slot_empty(qwen2: World) -> None:
    plan = qwen2.plan([qwen2.lora(Q)])
    os.truncate(qwen2.file, qwen2.file.stat().st_size - 1)
    with pytest.raises(ShortFileError):
        qwen2.bind(plan)
    assert not qwen2.bank.table.occupied.any()
