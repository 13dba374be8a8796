"""What is known of fields that no request type has: values that change nothing, names that are known and not built.

Data, and two judges by it: `check_absent` of one field, `check_names` of all top-level fields of a body. The gateway
asks them too, so that a misspelt field is refused before limits and engines have a say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loraplex_engine.errors import UnknownParameterError, UnsupportedParameterError
from loraplex_engine.wire.openai import ChatRequest, CompletionRequest, TokenizeRequest

Neutral = Mapping[str, tuple[Any, ...]]

_MAX_NAME_CHARS = 64
# fields of both routes with the values that change nothing; every other value is refused
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "use_beam_search": (False,),
}
NEUTRAL_CHAT: Neutral = _NEUTRAL | {
    "add_special_tokens": (False,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory",),
    "verbosity": ("medium",),
}
NEUTRAL_COMPLETION: Neutral = _NEUTRAL | {"add_special_tokens": (True,), "suffix": ("",)}
NEUTRAL_TOKENIZE: Neutral = {"return_token_strs": (False,)}
# what to send instead, of fields for which there is something
_HINTS = {
    "best_of": "leave it out or send the same number as `n`",
    "functions": "send `tools`",
    "function_call": "send `tool_choice`",
    "max_completion_tokens": "send `max_tokens`",
}
# known to OpenAI's API or to engines of this kind, and not built here
# fmt: off
UNSUPPORTED = frozenset((
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "audio", "bad_words", "best_of",
    "chat_template", "chat_template_kwargs", "continue_final_message", "documents", "echo", "function_call",
    "functions", "grammar", "guided_decoding_backend", "guided_whitespace_pattern", "include_reasoning",
    "logits_processors", "max_completion_tokens", "mm_processor_kwargs", "modalities", "moderation",
    "parallel_tool_calls", "prediction", "priority", "prompt_cache_options", "prompt_cache_retention",
    "prompt_embeds", "reasoning_effort", "request_id", "return_token_ids", "return_token_strs",
    "return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "suffix",
    "tool_choice", "tools", "top_logprobs", "truncate_prompt_tokens", "verbosity", "web_search_options",
))
# fmt: on
UNSUPPORTED_WITHIN = frozenset(
    (
        "audio",
        "continuous_usage_stats",
        "custom",
        "disable_additional_properties",
        "disable_any_whitespace",
        "disable_fallback",
        "prompt_cache_breakpoint",
        "reasoning",
        "reasoning_content",
        "structural_tag",
        "whitespace_pattern",
    )
)
"""The same of names within fields."""


_ROUTE_TO_FIELDS: dict[str, tuple[frozenset[str], Neutral]] = {
    route: (frozenset(kind.__struct_fields__), neutral)
    for route, kind, neutral in (
        ("/v1/chat/completions", ChatRequest, NEUTRAL_CHAT),
        ("/v1/completions", CompletionRequest, NEUTRAL_COMPLETION),
        ("/v1/tokenize", TokenizeRequest, NEUTRAL_TOKENIZE),
    )
}


def check_names(route: str, body: Mapping[str, Any]) -> None:
    """Refuse a body of a route by the names of its fields, as the engine does; a null is absent.

    Raises:
        UnsupportedParameterError: A field is known elsewhere and not built, or has a value that is not.
        UnknownParameterError: Nobody knows a field.
    """
    known, neutral = _ROUTE_TO_FIELDS[route]
    for name in [name for name in body if name not in known]:
        if body[name] is not None and not (route == "/v1/completions" and is_same_best_of(name, body)):
            check_absent(name, body[name], neutral)


def is_same_best_of(name: str, body: Mapping[str, Any]) -> bool:
    """Whether a field is the `best_of` of as many answers as are asked for anyway, which completions may say."""
    return name == "best_of" and not isinstance(body[name], bool) and bool(body[name] == (body.get("n") or 1))


def check_absent(name: str, value: Any, neutral: Neutral) -> None:
    """Refuse a field that the request type lacks, unless its value changes nothing.

    Raises:
        UnsupportedParameterError: The field is known elsewhere and not built here.
        UnknownParameterError: Nobody knows it.
    """
    if any(_is_same(value, allowed) for allowed in neutral.get(name, ())):
        return
    if name in neutral or name in UNSUPPORTED:
        allowed = " or ".join(map(_show, neutral.get(name, ())))
        hint = _HINTS.get(name) or (f"leave it out or send {allowed}" if allowed else "leave it out")
        raise UnsupportedParameterError(f"`{name}` is not supported here; {hint}.", param=name)
    shown = name[:_MAX_NAME_CHARS]
    raise UnknownParameterError(f"Nobody knows the parameter `{shown}`; check its spelling.", param=shown)


def _is_same(value: Any, allowed: Any) -> bool:
    """Equality in which true is not 1."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _show(value: Any) -> str:
    return msgspec.json.encode(value).decode()
