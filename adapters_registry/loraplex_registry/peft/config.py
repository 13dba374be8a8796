"""Reads adapter_config.json into `LoraSettings`: every value has its exact type, every field a stated fate.

Judges the config alone; whether it fits a base is for `target` and `tensor_rule`. Nothing is guessed: a missing rank or
alpha is refused, although PEFT would fill in 8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.field_rule import (
    BASE_CHANGING_INITS,
    KNOWN_FIELDS,
    PLAIN_INITS,
    REFUSED_FIELDS,
    SIMILAR_FIELDS,
    VARIANT_INIT,
    is_off,
)
from loraplex_registry.peft.file_rule import CONFIG_FILE
from loraplex_registry.peft.findings import Findings, show
from loraplex_registry.peft.magic import PEEK_BYTES, judge_text
from loraplex_registry.peft.strict_json import parse_json

MAX_RANK = 2**20
MIN_ALPHA, MAX_ALPHA = 1e-6, 1e6
MAX_LAYER = 1_000_000
MAX_TOKENS = 100_000
MAX_SAVED_NAMES = 256
MAX_UNKNOWN_FIELDS = 50
MAX_FIELD_LENGTH = 80

_REQUIRED_TYPE = "LORA"
_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")


BiasScope = Literal["none", "all", "lora_only"]


class LoraSettings(msgspec.Struct, frozen=True):
    """The honoured fields, typed; a field that was absent or null holds its default.

    `target_modules` and `exclude_modules` are a tuple of names, one regular expression, or None. Patterns keep the
    file's order, which decides where several keys match. `trainable_token_indices` are those of the embedding, or those
    of each module by the ending of its name, in the order of the trained rows.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    bias: BiasScope = "none"
    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[int, ...] | dict[str, tuple[int, ...]] = ()
    alora_invocation_tokens: tuple[int, ...] = ()
    ensure_weight_tying: bool = False


class AdapterConfig(msgspec.Struct, frozen=True):
    """A config that is JSON and of type LORA.

    `settings` is None where an honoured field has no valid value; `refused` maps refused fields to the reason.
    """

    base_name: str | None
    settings: LoraSettings | None
    refused: dict[str, str]


def judge_config(data: bytes, findings: Findings) -> AdapterConfig | None:
    """Judge the bytes of adapter_config.json.

    Adds the checks `json`, `peft_type`, `task_type`, `field_unsupported` and `field_value`, as far as the bytes allow.

    Returns:
        The config, or None where it is not the JSON of a LoRA adapter at all.
    """
    raw = _parse_object(data, findings)
    if raw is None or not _judge_peft_type(raw, findings):
        return None
    _judge_task_type(raw.get("task_type"), findings)
    refused = _refuse_fields(raw)
    for field, reason in refused.items():
        # a name may be empty, but who reads the report is always told where to look
        findings.fail("field_unsupported", f"{_shown_field(field)}: {reason}.", field or CONFIG_FILE)
    settings = _FieldReader(raw, findings).read_settings()
    findings.settle("task_type", "field_unsupported", "field_value")
    name = raw.get("base_model_name_or_path")
    is_readable = not findings.has_failed("field_value")
    return AdapterConfig(name if isinstance(name, str) else None, settings if is_readable else None, refused)


def _parse_object(data: bytes, findings: Findings) -> dict[str, Any] | None:
    if not judge_text(CONFIG_FILE, data[:PEEK_BYTES], findings):
        return None
    try:
        value = parse_json(data)
    except JsonError as error:
        findings.fail("json", f"The config is not strict JSON: {error}.", CONFIG_FILE)
        return None
    if not isinstance(value, dict):
        findings.fail(
            "json", "The config is not a JSON object; upload the file that save_pretrained wrote.", CONFIG_FILE
        )
        return None
    findings.settle("json")
    return value


def _judge_peft_type(raw: dict[str, Any], findings: Findings) -> bool:
    kind = raw.get("peft_type")
    if kind == _REQUIRED_TYPE:
        findings.settle("peft_type")
        return True
    if kind is None:
        message = f"peft_type is missing, so this is not a PEFT adapter{_guess_origin(raw)}; save a LoRA with PEFT."
    else:
        message = f"peft_type is {show(kind)}; only LORA, in capitals, is served: train a LoRA adapter."
    findings.fail("peft_type", message, "peft_type")
    return False


def _guess_origin(raw: dict[str, Any]) -> str:
    if "lora_parameters" in raw or "fine_tune_type" in raw:
        return " but one of MLX"
    if "config" in raw and "model_class" in raw:
        return " but one of AdapterHub"
    return ""


def _judge_task_type(task: Any, findings: Findings) -> None:
    if task is None or task == "CAUSAL_LM":
        return
    known = "serves another task" if task in _TASKS else "is not a task of PEFT"
    findings.fail("task_type", f"task_type {show(task)} {known}; only CAUSAL_LM adapters generate text.", "task_type")


def _refuse_fields(raw: dict[str, Any]) -> dict[str, str]:
    """Fields that are live and that nothing here can honour, with the reason."""
    refused = {field: why for field, why in REFUSED_FIELDS.items() if not is_off(raw.get(field))}
    unknown = [field for field, value in raw.items() if field not in KNOWN_FIELDS and not is_off(value)]
    for field in unknown[:MAX_UNKNOWN_FIELDS]:
        hint = (
            f"if it means {SIMILAR_FIELDS[field]}, rename it"
            if field in SIMILAR_FIELDS
            else "remove it or set it to null"
        )
        refused[field[:MAX_FIELD_LENGTH]] = f"no PEFT release known here has this field; {hint}"
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(BASE_CHANGING_INITS):
        refused["init_lora_weights"] = (
            f"{show(init)} training changes the base's weights; convert the adapter by saving it with "
            "path_initial_model_for_weight_conversion"
        )
    return refused


def _shown_field(field: str) -> str:
    return field if field in KNOWN_FIELDS else show(field)


class _FieldReader:
    """Reads the honoured fields one by one; a value of another type becomes a finding and its default."""

    def __init__(self, raw: dict[str, Any], findings: Findings) -> None:
        self._raw = raw
        self._findings = findings

    def read_settings(self) -> LoraSettings:
        """All honoured fields; only meaningful where no `field_value` failed."""
        self._check_init()
        settings = LoraSettings(
            r=self._read_required("r", _is_rank, "a whole number of 1 or more", 1),
            lora_alpha=self._read_required("lora_alpha", _is_alpha, _ALPHA_RULE, 1.0),
            use_rslora=self._read("use_rslora", _is_bool, "true or false", default=False),
            rank_pattern=self._read_pattern("rank_pattern", _is_rank, "whole numbers of 1 or more"),
            alpha_pattern=self._read_pattern("alpha_pattern", _is_alpha, _ALPHA_RULE),
            target_modules=self._read_modules("target_modules"),
            exclude_modules=self._read_modules("exclude_modules") or None,
            layers_to_transform=self._read_layers(),
            layers_pattern=_as_names(self._read("layers_pattern", _is_names, "a name or a list of names", default=())),
            bias=self._read("bias", lambda value: value in ("none", "all", "lora_only"), _BIAS_RULE, default="none"),
            use_dora=self._read("use_dora", _is_bool, "true or false", default=False),
            lora_bias=self._read("lora_bias", _is_bool, "true or false", default=False),
            modules_to_save=tuple(self._read("modules_to_save", _are_module_names, _NAMES_RULE, default=())),
            trainable_token_indices=self._read_token_indices(),
            alora_invocation_tokens=tuple(
                self._read("alora_invocation_tokens", _are_tokens, "a list of token ids", default=())
            ),
            ensure_weight_tying=self._read("ensure_weight_tying", _is_bool, "true or false", default=False),
        )
        self._check_layers(settings)
        self._check_combinations(settings)
        return settings

    def _read(self, field: str, is_valid: Callable[[Any], bool], rule: str, *, default: Any) -> Any:
        value = self._raw.get(field)
        if value is None:
            return default
        if is_valid(value):
            return value
        self._fail(field, f"{field} is {show(value)}; write {rule}.")
        return default

    def _read_required(self, field: str, is_valid: Callable[[Any], bool], rule: str, default: Any) -> Any:
        if self._raw.get(field) is None:
            self._fail(field, f"{field} is missing, and no value is guessed; write {rule}.")
        return self._read(field, is_valid, rule, default=default)

    def _read_pattern(self, field: str, is_valid: Callable[[Any], bool], rule: str) -> Any:
        pattern = self._read(field, lambda value: isinstance(value, dict), "an object of names and numbers", default={})
        for key, value in pattern.items():
            if not is_valid(value):
                self._fail(field, f"{field} gives {show(key)} the value {show(value)}; write {rule}.")
        return pattern

    def _read_modules(self, field: str) -> tuple[str, ...] | str | None:
        value = self._read(field, _is_names, "a list of names, or one regular expression", default=None)
        return tuple(value) if isinstance(value, list) else value

    def _read_layers(self) -> tuple[int, ...] | None:
        value = self._read("layers_to_transform", _is_layers, "a layer number or a list of them", default=None)
        return None if value is None or value == [] else tuple(value) if isinstance(value, list) else (value,)

    def _read_token_indices(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        rule = "a list of different token ids, or one for each module"
        value = self._read("trainable_token_indices", _are_token_indices, rule, default=())
        if isinstance(value, dict):
            return {name: tuple(indices) for name, indices in value.items()}
        return tuple(value)

    def _check_init(self) -> None:
        rule = "true, false or the name of a PEFT initialisation"
        self._read("init_lora_weights", _is_init, rule, default=True)

    def _check_layers(self, settings: LoraSettings) -> None:
        """As PEFT: layers only limit a list of names, and a pattern needs layers."""
        if isinstance(settings.target_modules, str) and settings.layers_to_transform is not None:
            message = "layers_to_transform cannot limit a target_modules that is a string; list the modules instead."
            self._fail("layers_to_transform", message)
        if settings.layers_pattern and settings.layers_to_transform is None:
            self._fail("layers_pattern", "layers_pattern needs layers_to_transform beside it; set both or neither.")

    def _check_combinations(self, settings: LoraSettings) -> None:
        """Fields that PEFT itself refuses beside each other, and those that aLoRA has no place for here."""
        init = self._raw.get("init_lora_weights")
        is_variant_init = isinstance(init, str) and init.lower() == VARIANT_INIT
        if settings.lora_bias and (settings.use_dora or isinstance(init, str)):
            self._fail("lora_bias", "PEFT has no lora_bias beside use_dora or a named init_lora_weights; drop one.")
        if settings.use_dora and is_variant_init:
            self._fail("use_dora", f"PEFT has no use_dora beside init_lora_weights {VARIANT_INIT}; drop one.")
        if settings.alora_invocation_tokens:
            self._check_activated(settings, is_variant_init=is_variant_init)

    def _check_activated(self, settings: LoraSettings, *, is_variant_init: bool) -> None:
        field = "alora_invocation_tokens"
        if settings.use_dora or is_variant_init:
            self._fail(field, f"PEFT has no {field} beside use_dora or init_lora_weights {VARIANT_INIT}; drop one.")
        if self._raw.get("task_type") is None:
            self._fail(field, f"PEFT never activates {field} without a task_type; set it to CAUSAL_LM.")
        if settings.bias != "none" or settings.modules_to_save or settings.trainable_token_indices:
            beside = "bias, modules_to_save or trainable_token_indices"
            self._fail(field, f"{field} beside {beside} is not served: PEFT activates A and B alone; drop one.")

    def _fail(self, field: str, message: str) -> None:
        self._findings.fail("field_value", message, field)


_BIAS_RULE = "none, all or lora_only"
_NAMES_RULE = "a list of module names"
_MODULE_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_ALPHA_RULE = f"a number other than 0, at most {MAX_ALPHA:g} in size"


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and MIN_ALPHA <= abs(value) <= MAX_ALPHA and math.isfinite(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_layers(value: Any) -> bool:
    return all(
        type(layer) is int and 0 <= layer <= MAX_LAYER for layer in (value if isinstance(value, list) else [value])
    )


def _is_module_name(value: Any) -> bool:
    """PEFT compares endings of paths with it, and makes an expression of it: only plain names mean one thing."""
    return isinstance(value, str) and _MODULE_NAME.fullmatch(value) is not None


def _are_module_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_SAVED_NAMES and all(_is_module_name(name) for name in value)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_TOKENS and all(type(i) is int and i >= 0 for i in value)


def _are_token_indices(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= MAX_SAVED_NAMES and all(
            _is_module_name(name) and bool(ids) and _are_different_tokens(ids) for name, ids in value.items()
        )
    return _are_different_tokens(value)


def _are_different_tokens(value: Any) -> bool:
    return _are_tokens(value) and len(set(value)) == len(value)


def _is_init(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    return isinstance(value, str) and (value in PLAIN_INITS or value.startswith(BASE_CHANGING_INITS))


def _as_names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) and value else tuple(value)
