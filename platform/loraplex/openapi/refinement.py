"""What message types cannot say of their fields: ranges, lengths, patterns; by type and field."""

from __future__ import annotations

from loraplex.openapi.schema import NAME, POSITIVE, SHA256, TEXT, TIME, Schema
from loraplex_registry.wire.limits import MAX_LIMIT, RATE_LIMITS

_PENALTY: Schema = {"minimum": -2, "maximum": 2}
_SAMPLING: dict[str, Schema] = {
    "max_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "n": {"minimum": 1, "maximum": 16},
    "stop_token_ids": {"items": {"type": "integer", "minimum": 0}},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"minimum": 0.01, "maximum": 2},
    "prompt_logprobs": {"minimum": 0, "maximum": 20},
    "cache_salt": {"maxLength": 256},
}
_DATES: dict[str, Schema] = {"created_at": TIME}
_LIMITS: Schema = {"anyOf": [{"$ref": "#/components/schemas/Limits"}, {"type": "null"}]}
_CALL_LIMITS: Schema = {"$ref": "#/components/schemas/RateLimits"}
_NEW_CALL_LIMITS: Schema = {"anyOf": [_CALL_LIMITS, {"type": "null"}]}
_RATES: dict[str, Schema] = {name: {"minimum": 1, "maximum": MAX_LIMIT} for name in RATE_LIMITS}
_WEIGHT: Schema = {"minimum": 1, "maximum": 1000}
_PRIORITY: Schema = {"minimum": -8, "maximum": 8}
_KEY: dict[str, Schema] = {
    "limits": _CALL_LIMITS,
    "priority": _PRIORITY,
    "created_at": TIME,
    "expires_at": TIME,
    "revoked_at": TIME,
    "last_used_at": TIME,
    "rotated_from": {"pattern": "^key_[a-z2-7]{26}$"},
}
_MODULES: Schema = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"pattern": r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$", "maxLength": 200},
    "additionalProperties": {
        "anyOf": [
            {"type": "array", "prefixItems": [POSITIVE, POSITIVE], "minItems": 2, "maxItems": 2},
            {"$ref": "#/components/schemas/NewModule"},
        ]
    },
}
_HASHES: Schema = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "propertyNames": {"enum": ["F32", "F16", "BF16"]},
        "additionalProperties": SHA256,
    },
}

REFINED: dict[str, dict[str, Schema]] = {
    "AdapterPatch": {"is_default": {"const": True}, "limits": _NEW_CALL_LIMITS},
    "AdapterView": _DATES | {"limits": _CALL_LIMITS},
    "AliasChangeView": _DATES,
    "AliasView": {"updated_at": TIME, "targets": {"minItems": 1, "maxItems": 8}},
    "BaseView": _DATES,
    "ChatRequest": _SAMPLING
    | {
        "max_tokens": {"minimum": 1, "maximum": 2**31 - 1},
        "max_completion_tokens": {"minimum": 1, "maximum": 2**31 - 1},
        "top_logprobs": {"minimum": 0, "maximum": 20},
        "messages": {"minItems": 1},
    },
    "CompletionRequest": _SAMPLING | {"logprobs": {"minimum": 0, "maximum": 20}},
    "EngineUsage": {"began_at": TIME},
    "Event": {"at": TIME},
    "FleetDifference": {"since": TIME},
    "FleetRepair": {"at": TIME},
    "FileAnnouncement": {
        "size": {"minimum": 0, "maximum": 2**53},
        "sha256": SHA256,
        "part_size": {"minimum": 8 << 20, "maximum": 64 << 20},
        "part_sha256": {"items": SHA256},
    },
    "Key": _KEY,
    "KeyCreate": {
        "name": TEXT,
        "owner": TEXT,
        "scopes": {"items": {"$ref": "#/components/schemas/Key/properties/scopes/items"}},
        "role": {"enum": ["admin", "admin_readonly"]},
        "limits": _NEW_CALL_LIMITS,
        "priority": _PRIORITY,
    },
    "KeyPatch": {"limits": _NEW_CALL_LIMITS, "priority": _PRIORITY},
    "KeyRotate": {"overlap_s": {"minimum": 0, "maximum": 30 * 86_400}},
    "Limits": _RATES
    | {
        "adapter_bytes": {"minimum": 1, "maximum": 2**63 - 1},
        "adapter_versions": POSITIVE,
        "adapter_rank": POSITIVE,
    },
    "NewModule": {"out_features": POSITIVE, "in_features": POSITIVE},
    "NewBase": {
        "name": NAME,
        "fingerprint": {"minLength": 1, "maxLength": 128},
        "weights_digest": {"maxLength": 128},
        "vocab_size": POSITIVE,
        "default_context": POSITIVE,
        "max_lora_rank": {"minimum": 1, "maximum": 256},
        "max_saved_bytes": {"minimum": 0, "maximum": 2**63 - 1},
        "accepted_names": {"maxItems": 64, "items": {"type": "string", "minLength": 1, "maxLength": 200}},
        "modules": _MODULES,
        "matrix_hashes": _HASHES,
    },
    "NewKey": _KEY | {"key": {"pattern": "^lpx_"}},
    "NewTargets": {"targets": {"minItems": 1, "maxItems": 8}},
    "OutcomeRow": {"minute": TIME},
    "PartView": {"sha256": SHA256, "expires_at": TIME},
    "Quarantine": {"since": TIME},
    "RequestUsage": {"created_at": TIME, "settled_at": TIME},
    "Target": {"version": POSITIVE, "weight": {"minimum": 1, "maximum": 100}},
    "RateLimits": _RATES,
    "Tenant": _DATES | {"limits": {"$ref": "#/components/schemas/Limits"}, "weight": _WEIGHT},
    "TenantCreate": {"name": NAME, "display_name": TEXT, "limits": _LIMITS, "weight": _WEIGHT},
    "TenantPatch": {
        "display_name": TEXT,
        "limits": _LIMITS,
        "state": {"enum": ["active", "suspended"]},
        "weight": _WEIGHT,
    },
    "UploadView": {"state": {"enum": ["open", "completing", "completed"]}, "expires_at": TIME},
    "VersionView": {
        "kind": {"enum": ["lora", "full"]},
        "state": {"enum": ["validating", "ready", "quarantined", "retired", "purged"]},
        "created_at": TIME,
    },
}
