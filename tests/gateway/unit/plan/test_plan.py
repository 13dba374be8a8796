"""The planner: the worked figures of an 8B Llama, published sizes, what fits, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.errors import InvalidRequestError
from loraplex.plan.adapter import AdapterGroup
from loraplex.plan.card import CARD_TO_MIB, read_card
from loraplex.plan.figures import Plan
from loraplex.plan.planner import build_plan
from loraplex.plan.preset import PRESETS, find_preset
from loraplex.plan.shape import ModelShape, read_shape
from loraplex.plan.spec import PlanSpec
from loraplex_engine.config import EngineConfig
from loraplex_engine.loop.memory import plan_memory
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.layout import expected_tensors
from support import tiny_llama_config, tiny_qwen2_config, tiny_tied_config

ATTENTION = ("q", "k", "v", "o")
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
}
"""Parameters of each model as it was released."""
CONFIGS = {
    **PRESETS,
    "tiny": tiny_llama_config(),
    "tied": tiny_tied_config(),
    "biased": tiny_qwen2_config(),
    "llama-biased": tiny_llama_config(attention_bias=True, mlp_bias=True),
}


def plan(*groups: AdapterGroup, **fields: Any) -> Plan:
    return build_plan(PlanSpec(adapters=groups, **fields))


def forty(**fields: Any) -> Plan:
    """The worked example: Llama-3.1-8B and forty adapters of rank 16 on the attention projections."""
    return plan(AdapterGroup(count=40, rank=16, modules=ATTENTION), **fields)


def values_of(found: Plan) -> dict[str, str]:
    return {row.name: row.value for section in found.explanation for row in section.rows}


def test_worked_figures_of_one_adapter_are_exact() -> None:
    group = forty().adapters[0]
    assert group.layer_parameters == 425_984
    assert group.num_parameters == 13_631_488
    assert group.adapter_bytes == 27_262_976
    values = values_of(forty())
    assert values["parameters a layer"] == "425,984"
    assert values["one adapter in bfloat16"] == "27.26 MB = 26.0 MiB"


def test_worked_figures_of_the_base_are_exact() -> None:
    found = forty()
    assert found.model.weight_bytes == 16_060_522_496
    assert values_of(found)["weights in bfloat16"] == "14.96 GiB"
    assert found.model.kv_bytes_per_token == {"float32": 262_144, "bfloat16": 131_072, "fp8": 65_536}


def test_worked_figures_of_forty_copies_against_forty_adapters_are_exact() -> None:
    found = forty()
    assert found.copies is not None
    assert found.copies.copies_bytes == 40 * 16_060_522_496
    assert found.copies.adapters_bytes == 1_090_519_040
    assert found.copies.ratio_tenths == 5891
    assert found.copies.gpus_for_weights == 8
    assert found.copies.gpus_for_adapters == 1
    values = values_of(found)
    assert values["full copies"] == "598 GiB"
    assert values["40 adapters"] == "1.09 GB = 1.016 GiB"
    assert values["one base and adapters"] == "15.97 GiB"


def test_quoted_figures_stand_beside_the_exact_ones_with_the_reason() -> None:
    quoted = forty().quoted
    assert quoted is not None
    assert (quoted.exact_gib, quoted.mixed_gib) == ("1.016 GiB", "1.07 GiB")
    assert (quoted.exact_ratio, quoted.mixed_ratio) == ("589x", "560x")
    assert "1,092.0 MB" in quoted.reason
    assert "divided by 1,024" in quoted.reason
    assert values_of(forty())["adapters"] == "1.016 GiB, quoted 1.07 GiB"


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_as_many_parameters_as_the_released_model(name: str) -> None:
    assert read_shape(PRESETS[name]).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_tensors_that_the_engine_reads(name: str) -> None:
    tensors = expected_tensors(ModelConfig.from_hf(CONFIGS[name]))
    expected = 0
    for shape in tensors.values():
        values = 1
        for size in shape:
            values *= size
        expected += values
    assert read_shape(CONFIGS[name]).num_parameters == expected


def test_a_step_is_estimated_as_the_engine_foresees_it() -> None:
    config = EngineConfig(base="", cache_dir="", max_num_seqs=256, max_num_batched_tokens=8192)
    foreseen = plan_memory(config, ModelConfig.from_hf(PRESETS["llama-3.1-8b"]), 2, is_mapped=False)
    assert forty().card.step_bytes == foreseen.step_bytes


def test_card_is_filled_to_the_byte() -> None:
    card = forty(gpu="80GiB", gpu_memory_utilization=0.9, max_model_len=8192).card
    usable = 80 * 2**30 * 9 // 10
    left = usable - 16_060_522_496 - card.step_bytes - 2**30 - 8 * 27_262_976
    assert (card.usable_bytes, card.free_bytes) == (usable, left)
    assert card.kv_tokens == left // (131_072 * 16) * 16
    assert card.full_contexts == card.kv_tokens // 8192
    assert card.tokens_per_request == card.kv_tokens // 256


def test_fp8_cache_holds_twice_the_tokens() -> None:
    whole, half = forty().card, forty(kv_cache_dtype="fp8").card
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert half.kv_tokens - 2 * whole.kv_tokens in range(32)


def test_slots_cost_the_cache_what_the_largest_adapters_hold() -> None:
    found = plan(
        AdapterGroup(count=2, rank=64, modules=ATTENTION),
        AdapterGroup(count=6, rank=16, modules=ATTENTION),
        max_loras=3,
    )
    rows = {row.max_loras: row.slot_bytes for row in found.slots}
    one = 27_262_976
    assert rows == {1: 4 * one, 2: 8 * one, 3: 9 * one, 4: 10 * one, 8: 14 * one}
    tokens = [row.kv_tokens for row in found.slots]
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(tokens)) == len(tokens)


def test_one_card_that_is_too_small_for_the_context_is_told_with_the_length_that_fits() -> None:
    found = forty(gpu="l4")
    alone = forty(gpu="l4", max_model_len=24_000).card
    assert alone.fits
    assert alone.tensor_parallel_size == 1
    assert found.card.tensor_parallel_size == 2
    assert f"--max-model-len {alone.kv_tokens} or less" in found.card.verdict
    assert forty(gpu="l4", max_model_len=alone.kv_tokens + 1).card.tensor_parallel_size == 2
    assert forty(gpu="l4", max_model_len=alone.kv_tokens).card.tensor_parallel_size == 1


def test_model_that_no_card_holds_is_split_over_the_fewest_that_do() -> None:
    found = plan(model="llama-3.1-70b", gpu="h100-80g")
    assert found.card.fits
    assert found.card.tensor_parallel_size == 4
    assert found.card.weight_bytes == 70_553_706_496 * 2 // 4
    assert not plan(model="llama-3.1-70b", gpu="l4").card.fits
    assert "take a larger card" in plan(model="llama-3.1-70b", gpu="t4").card.verdict


def test_copies_that_serve_need_more_cards_than_their_weights() -> None:
    copies = forty(max_model_len=8192).copies
    assert copies is not None
    assert copies.copies_per_gpu == 3
    assert copies.gpus_for_copies == 14
    assert copies.gpus_for_weights == 8


def test_without_adapters_there_is_nothing_to_compare() -> None:
    found = plan()
    assert (found.adapters, found.slots, found.copies, found.quoted) == ([], [], None, None)
    assert found.card.slot_bytes == 0


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (("q", "v"), ["q_proj", "v_proj"]),
        (("o_proj", "attention"), ["q_proj", "k_proj", "v_proj", "o_proj"]),
        (("all",), ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        (("head", "embed", "q"), ["q_proj", "embed_tokens", "lm_head"]),
    ],
)
def test_modules_have_short_names_and_sets(modules: tuple[str, ...], expected: list[str]) -> None:
    assert plan(AdapterGroup(modules=modules)).adapters[0].modules == expected


def test_lora_on_embedding_and_head_is_there_once() -> None:
    shape = read_shape(PRESETS["smollm2-135m"])
    found = plan(AdapterGroup(rank=4, modules=("embed", "head")), model="smollm2-135m").adapters[0]
    assert found.num_parameters == 2 * 4 * (shape.vocab_size + shape.hidden_size)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
    ],
)
def test_preset_is_found_by_the_hub_id(name: str, expected: str) -> None:
    found = find_preset(name)
    assert found is not None
    assert found[0] == expected


def test_card_is_known_by_name_or_by_size() -> None:
    assert read_card("H100").memory_bytes == 81_559 << 20
    assert read_card("24").memory_bytes == read_card("24GiB").memory_bytes == 24 << 30
    assert read_card("24.5 GiB").memory_bytes == 49 << 29
    assert read_card("24GB").memory_bytes == 24 * 10**9
    assert read_card("23034MiB").memory_bytes == read_card("l4").memory_bytes
    assert all(name == name.lower() for name in CARD_TO_MIB)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "no-such"}, "model"),
        ({"gpu": "h900"}, "gpu"),
        ({"gpu": "0"}, "gpu"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"adapters": [AdapterGroup(modules=("x",))]}, "adapters.modules"),
        ({"adapters": [AdapterGroup(modules=())]}, "adapters.modules"),
        ({"adapters": [AdapterGroup(rank=0)]}, "adapters.rank"),
        ({"adapters": [AdapterGroup(count=10**6), AdapterGroup()]}, "adapters"),
        ({"config": {"architectures": ["GemmaForCausalLM"]}}, "config"),
        ({"config": tiny_llama_config(hidden_size=0)}, "config"),
        ({"config": tiny_llama_config(num_attention_heads="8")}, "config"),
        ({"config": tiny_llama_config(quantization_config={"quant_method": "awq"})}, "config"),
        ({"config": {"architectures": 5}}, "config"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_plan(PlanSpec(**fields))
    assert caught.value.param == param


def test_config_may_be_given_in_place_of_a_preset() -> None:
    found = plan(model="mine", config=PRESETS["smollm2-135m"])
    assert found.model.name == "mine"
    assert found.model.num_parameters == PUBLISHED["smollm2-135m"]


def test_shape_of_a_config_without_key_value_heads_has_as_many_as_heads() -> None:
    config = {key: value for key, value in tiny_llama_config().items() if key != "num_key_value_heads"}
    shape: ModelShape = read_shape(config)
    assert shape.num_kv_heads == shape.num_heads
