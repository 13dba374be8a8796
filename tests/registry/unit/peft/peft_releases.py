"""What each release of PEFT writes into a LoRA's adapter_config.json: field to default, as changes between releases.

Gathered from the releases' own dataclasses; the newest one is compared with what is installed.
"""

from __future__ import annotations

from typing import Any

GONE = object()
"""A field that the release no longer has."""

CHANGES: dict[str, dict[str, Any]] = {
    "0.1": {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        "r": 8,
        "target_modules": None,
        "lora_alpha": None,
        "lora_dropout": None,
        "merge_weights": False,
        "fan_in_fan_out": False,
        "enable_lora": None,
        "bias": "none",
        "modules_to_save": None,
    },
    "0.2": {},
    "0.3": {"init_lora_weights": True, "enable_lora": GONE, "merge_weights": GONE},
    "0.4": {
        "auto_mapping": None,
        "revision": None,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "layers_to_transform": None,
        "layers_pattern": None,
    },
    "0.5": {},
    "0.6": {},
    "0.7": {
        "rank_pattern": {},
        "alpha_pattern": {},
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "loftq_config": {},
    },
    "0.8": {"use_rslora": False},
    "0.9": {"use_dora": False},
    "0.10": {"layer_replication": None},
    "0.11": {},
    # written as {"ephemeral_gpu_offload": false} by some, and dropped by PEFT when it reads
    "0.12": {"runtime_config": {"ephemeral_gpu_offload": False}},
    "0.13": {},
    "0.14": {"exclude_modules": None, "eva_config": None, "lora_bias": False},
    "0.15": {"trainable_token_indices": None, "corda_config": None},
    "0.16": {"use_qalora": False, "qalora_group_size": 16},
    "0.17": {"target_parameters": None},
    "0.18": {
        "peft_version": "0.18.1",
        "alora_invocation_tokens": None,
        "arrow_config": None,
        "ensure_weight_tying": False,
    },
    "0.19": {"lora_ga_config": None, "use_bdlora": None},
    "0.20": {"velora_config": None, "monteclora_config": None},
    "0.21": {"kasa_config": None},
}

INITS: dict[str, tuple[bool | str, ...]] = {
    "0.3": (True, False),
    "0.7": ("gaussian", "loftq"),
    "0.11": ("pissa", "pissa_niter_16"),
    "0.12": ("olora",),
    "0.14": ("eva",),
    "0.15": ("corda",),
    "0.16": ("orthogonal",),
    "0.19": ("lora_ga",),
    "0.20": ("mica",),
}
"""Values of `init_lora_weights` that a release added."""


def list_releases() -> dict[str, dict[str, Any]]:
    """All fields of each release with their defaults."""
    releases: dict[str, dict[str, Any]] = {}
    fields: dict[str, Any] = {}
    for release, changes in CHANGES.items():
        fields = {name: value for name, value in (fields | changes).items() if value is not GONE}
        releases[release] = fields
    return releases
