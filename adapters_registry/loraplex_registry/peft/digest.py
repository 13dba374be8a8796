"""The canonical digest of an adapter: one name for one meaning, whatever the order of keys and tensors in its files.

Canonical form: `{"v": 1, "base": fingerprint, "config": honoured fields with defaults, "template": sha256 or null,
"tensors": [{"name", "dtype", "shape", "sha256"}]}` as JSON with sorted keys, no spaces and ASCII only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from loraplex_registry.peft.claim import Claims
from loraplex_registry.peft.config import LoraSettings
from loraplex_registry.peft.spec import TensorRef
from loraplex_registry.peft.target import Resolution, ResolvedPattern

FORM_VERSION = 1


class TensorHash(msgspec.Struct, frozen=True):
    """A tensor's place in the canonical form; `sha256` is that of its bytes, in hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, ref: TensorRef, sha256: str) -> TensorHash:
        """The entry of a tensor whose bytes were hashed."""
        return cls(ref.name, ref.dtype, ref.shape, sha256)


def canonical_digest(
    base_fingerprint: str,
    config: dict[str, Any],
    tensors: Iterable[TensorHash],
    *,
    template_sha256: str | None = None,
) -> str:
    """The digest of an adapter version.

    Args:
        base_fingerprint: `BaseSpec.fingerprint`.
        config: what `canonical_config` returns.
        tensors: all tensors of the weights file, in any order.
        template_sha256: hex sha256 of chat_template.jinja, where the adapter has one.

    Returns:
        `sha256:` and 64 hex digits.
    """
    form = {
        "v": FORM_VERSION,
        "base": base_fingerprint,
        "config": config,
        "template": template_sha256,
        "tensors": [msgspec.to_builtins(tensor) for tensor in sorted(tensors, key=lambda tensor: tensor.name)],
    }
    text = json.dumps(form, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def canonical_config(settings: LoraSettings, resolution: Resolution, claims: Claims) -> dict[str, Any]:
    """The honoured fields in one spelling: defaults filled, sets sorted, whole numbers without a point.

    A pattern is an object where the order of its keys decides nothing, else a list of pairs in that order. Fields
    beyond plain LoRA stand there only where they take effect, so plain LoRA has the same digest with and without them.

    Args:
        settings: the honoured fields.
        resolution: what they mean on the base.
        claims: what the config claims beside A and B.
    """
    return {
        "peft_type": "LORA",
        "r": settings.r,
        "lora_alpha": _plain_number(settings.lora_alpha),
        "use_rslora": settings.use_rslora,
        "rank_pattern": _canonical_pattern(settings.rank_pattern, resolution.ranks),
        "alpha_pattern": _canonical_pattern(settings.alpha_pattern, resolution.alphas),
        "target_modules": _canonical_names(settings.target_modules),
        "exclude_modules": _canonical_names(settings.exclude_modules),
        "layers_to_transform": _sorted_or_none(settings.layers_to_transform),
        "layers_pattern": list(settings.layers_pattern),
        **_optional_fields(settings, resolution, claims),
    }


def _optional_fields(settings: LoraSettings, resolution: Resolution, claims: Claims) -> dict[str, Any]:
    is_tied = claims.saved_tie is not None or any(target.tied_to is not None for target in resolution.targets)
    fields = {
        "bias": settings.bias if settings.bias != "none" else None,
        "use_dora": settings.use_dora,
        "lora_bias": settings.lora_bias,
        "modules_to_save": sorted(set(settings.modules_to_save)),
        "trainable_token_indices": {claim.path: list(claim.token_ids) for claim in claims.rows},
        "alora_invocation_tokens": list(settings.alora_invocation_tokens),
        "ensure_weight_tying": is_tied,
    }
    return {field: value for field, value in fields.items() if value}


def _plain_number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _canonical_pattern(pattern: dict[str, Any], resolved: ResolvedPattern) -> dict[str, Any] | list[list[Any]]:
    plain = {key: _plain_number(value) for key, value in pattern.items()}
    return [[key, value] for key, value in plain.items()] if resolved.is_ordered else dict(sorted(plain.items()))


def _canonical_names(names: tuple[str, ...] | str | None) -> list[str] | str | None:
    return names if names is None or isinstance(names, str) else sorted(set(names))


def _sorted_or_none(values: tuple[int, ...] | None) -> list[int] | None:
    return None if values is None else sorted(set(values))
