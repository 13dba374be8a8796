"""The fate of every field that any PEFT release has written into a LoRA's adapter_config.json.

Three tables: honoured (read by `config`), harmless (no influence on the answers of a served adapter) and refused unless
off. A field in none of them is unknown: accepted where it is off, refused where it is live. Pure data, kept in step
with PEFT by a test.
"""

from __future__ import annotations

from typing import Any

HONOURED_FIELDS: dict[str, str] = {
    "peft_type": "must be LORA",
    "task_type": "CAUSAL_LM or absent",
    "base_model_name_or_path": "must name the base model",
    "r": "the rank",
    "lora_alpha": "the numerator of the scaling",
    "use_rslora": "scaling by the square root of the rank",
    "rank_pattern": "ranks of single modules",
    "alpha_pattern": "alphas of single modules",
    "target_modules": "list, dotted names, regular expression or all-linear",
    "exclude_modules": "list or regular expression",
    "layers_to_transform": "the layers that a list of target_modules is limited to",
    "layers_pattern": "the name of the list of layers that layers_to_transform counts",
    "bias": "none, all or lora_only: which trained biases replace the base's",
    "use_dora": "trained magnitudes beside A and B",
    "lora_bias": "a bias of the LoRA layer itself",
    "modules_to_save": "whole trained norms, embedding or head",
    "trainable_token_indices": "trained rows of embedding or head",
    "alora_invocation_tokens": "tokens from whose last occurrence on the adapter acts",
    "ensure_weight_tying": "what changes a tied embedding changes the head too",
    "init_lora_weights": "any value that leaves the base's weights as they are",
}

HARMLESS_FIELDS: dict[str, str] = {
    "auto_mapping": "a hint for loading the base in Python",
    "peft_version": "the release that wrote the file",
    "revision": "the base is the one served here",
    "inference_mode": "only training differs",
    "lora_dropout": "only training differs",
    "merge_weights": "how early releases evaluated; the result is the same",
    "fan_in_fan_out": "how a base stores its weights; PEFT sets it to false for linear layers",
    "megatron_core": "a Python module name",
    "qalora_group_size": "only read with use_qalora",
    "loftq_config": "only read with init_lora_weights loftq, which is refused",
    "eva_config": "only read when training starts",
    "corda_config": "only read with init_lora_weights corda, which is refused",
    "lora_ga_config": "only read with init_lora_weights lora_ga, which is refused",
    "runtime_config": "PEFT itself drops it on loading",
}

REFUSED_FIELDS: dict[str, str] = {
    "layer_replication": "replicated layers change the base; train without layer_replication",
    "target_parameters": "LoRA on bare parameters is not served; target linear modules instead",
    "enable_lora": "fused layers of early PEFT are not served; train again with separate q, k and v modules",
    "megatron_config": "Megatron layers are not served; train on the transformers model",
    "use_qalora": "QA-LoRA pools its inputs, which is not served; train without use_qalora",
    "use_bdlora": "block-diagonal LoRA is not served; train without use_bdlora",
    "arrow_config": "Arrow routing between adapters is not served; upload one plain LoRA",
    "velora_config": "VeLoRA is not served; train without velora_config",
    "monteclora_config": "MonteCLoRA samples its weights, which is not served; train without monteclora_config",
    "kasa_config": "KaSA truncates the base's weights; train without kasa_config",
}

BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` whose training starts from changed base weights."""

PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base as it is."""

VARIANT_INIT = "mica"
"""The one of `PLAIN_INITS` that PEFT takes for a variant of LoRA, which excludes every other."""

KNOWN_FIELDS = HONOURED_FIELDS.keys() | HARMLESS_FIELDS.keys() | REFUSED_FIELDS.keys()

SIMILAR_FIELDS = {"alpha": "lora_alpha", "rank": "r", "lora_rank": "r", "lora_r": "r", "scaling": "lora_alpha"}
"""What people write by mistake, and what they meant."""


def is_off(value: Any) -> bool:
    """Whether a value switches its field off: null, false or empty."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)
