"""Judges the fields of a request body: names, types, ranges. A field is honoured, neutral, or refused by name.

Nothing is accepted and ignored: a field that is not built has at most the value that changes nothing (`_NEUTRAL`).
`param` of every refusal is the top-level field.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from loraplex_engine.errors import (
    InvalidRequestError,
    UnknownParameterError,
    UnsupportedParameterError,
)
from loraplex_engine.wire import openai
from loraplex_engine.wire.openai import ChatRequest, CompletionRequest, SamplingFields, TokenizeRequest

_Request = TypeVar("_Request", bound=msgspec.Struct)
_MAX_REASON_CHARS = 300
_MAX_NAME_CHARS = 64
_MAX_STOP_TOKENS = 64
_MAX_BIAS = 100
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_MAX_METADATA_KEY_CHARS, _MAX_METADATA_VALUE_CHARS = 64, 512
_FIELD_IN_MESSAGE = re.compile(r"at `\$\.(\w+)|missing required field `(\w+)`$")

# fields with the values that change nothing; every other value is refused
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
}
_NEUTRAL_CHAT = _NEUTRAL | {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    # says how tools are called, and there are none
    "parallel_tool_calls": (True, False),
}
_NEUTRAL_TOKENIZE = {name: _NEUTRAL_CHAT[name] for name in ("tools", "continue_final_message", "chat_template_kwargs")}
_NEUTRAL_COMPLETION = _NEUTRAL | {"echo": (False,), "suffix": ("",)}
# known to OpenAI's API or to engines of this kind, and not built here
# fmt: off
_UNSUPPORTED = frozenset((
    "allowed_token_ids", "audio", "bad_words", "best_of", "cache_salt", "chat_template", "chat_template_kwargs",
    "documents", "echo", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "include_stop_str_in_output", "modalities", "parallel_tool_calls", "prediction",
    "prompt_cache_options", "prompt_cache_retention", "prompt_logprobs", "reasoning_effort", "response_format",
    "skip_special_tokens", "spaces_between_special_tokens", "structured_outputs", "suffix", "tool_choice", "tools",
    "top_logprobs", "truncate_prompt_tokens", "verbosity", "web_search_options",
))
# fmt: on
# each with its lowest and highest value
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, float("inf")),
    ("max_completion_tokens", 1, float("inf")),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, float("inf")),
    ("min_p", 0, 1),
    ("n", 1, openai.MAX_CHOICES),
    ("seed", -(2**63), 2**63 - 1),
    ("min_tokens", 0, float("inf")),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    # far from 0, by which it divides
    ("repetition_penalty", 0.01, 2),
    # of completions; a chat's is true or false, which is in the range
    ("logprobs", 0, openai.MAX_TOP_LOGPROBS),
    ("top_logprobs", 0, openai.MAX_TOP_LOGPROBS),
)


def read_chat(body: dict[str, Any]) -> ChatRequest:
    """Return the checked request of /v1/chat/completions.

    Raises:
        InvalidRequestError: A field has a wrong type or range, is unknown, or is not built; `param` names it.
    """
    request = _convert(_with_messages(body), ChatRequest, _NEUTRAL_CHAT)
    _check_sampling(request)
    if not request.messages:
        raise InvalidRequestError("`messages` must hold at least one message.", param="messages")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequestError(
                "`max_tokens` and `max_completion_tokens` differ; send one of them.", param="max_completion_tokens"
            )
        request.max_tokens = request.max_completion_tokens
    return request


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    """Return the checked request of /v1/completions; its prompts are checked with the tokenizer. Raises as above."""
    if "best_of" in body and _is_same(body["best_of"], body.get("n") or 1):
        body = {name: value for name, value in body.items() if name != "best_of"}
    request = _convert(body, CompletionRequest, _NEUTRAL_COMPLETION)
    _check_sampling(request)
    return request


def read_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    """Return the checked request of /v1/tokenize. Raises as above."""
    request = _convert(_with_messages(body), TokenizeRequest, _NEUTRAL_TOKENIZE)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Send either `prompt` or `messages`.", param="prompt")
    return request


def _convert(body: dict[str, Any], kind: type[_Request], neutral: dict[str, tuple[Any, ...]]) -> _Request:
    given = {name: value for name, value in body.items() if value is not None}
    known = kind.__struct_fields__
    for name in [name for name in given if name not in known]:
        _check_absent(name, given.pop(name), neutral)
    try:
        request = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        reason = str(error)
        found = _FIELD_IN_MESSAGE.search(reason)
        raise InvalidRequestError(
            f"{reason.replace('$.', '')[:_MAX_REASON_CHARS]}.", param=(found[1] or found[2]) if found else None
        ) from error
    if not given["model"]:
        raise InvalidRequestError("`model` must not be empty.", param="model")
    return request


def _check_absent(name: str, value: Any, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Refuse a field that is not built, unless its value changes nothing."""
    if any(_is_same(value, allowed) for allowed in neutral.get(name, ())):
        return
    if name in neutral or name in _UNSUPPORTED:
        allowed = " or ".join(map(_show, neutral.get(name, ())))
        hint = f"leave it out or send {allowed}" if allowed else "leave it out"
        raise UnsupportedParameterError(f"`{name}` is not supported here; {hint}.", param=name)
    shown = name[:_MAX_NAME_CHARS]
    raise UnknownParameterError(f"Nobody knows the parameter `{shown}`; check its spelling.", param=shown)


def _is_same(value: Any, allowed: Any) -> bool:
    """Equality in which true is not 1."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _show(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _with_messages(body: dict[str, Any]) -> dict[str, Any]:
    """Drop what means nothing in messages (nulls, empty tool calls) and refuse what is not built, by name."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    return body | {"messages": [_read_message(message, index) for index, message in enumerate(messages)]}


def _read_message(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    kept = {name: value for name, value in message.items() if value is not None and (name, value) != ("tool_calls", [])}
    where = f"messages[{index}]"
    if kept.get("role") in ("tool", "function") or kept.keys() & {"tool_calls", "tool_call_id", "function_call"}:
        raise UnsupportedParameterError(f"Tools are not supported here ({where}).", param="messages")
    content = kept.get("content")
    if content == []:
        raise InvalidRequestError(f"`{where}.content` must not be an empty list.", param="messages")
    if isinstance(content, list) and any(isinstance(part, dict) and part.get("type") != "text" for part in content):
        raise UnsupportedParameterError(f"`{where}.content` may only hold parts of type text.", param="messages")
    return kept


def _check_sampling(request: SamplingFields) -> None:
    for name, low, high in _RANGES:
        value = getattr(request, name, None)
        if value is not None and not low <= value <= high:
            limit = f"from {low} to {high}" if high != float("inf") else f"at least {low}"
            raise InvalidRequestError(f"`{name}` is {_show_number(value)}, but must be {limit}.", param=name)
    if request.top_p == 0:
        raise InvalidRequestError("`top_p` must be above 0.", param="top_p")
    for check in _CHECKS:
        check(request)


def _show_number(value: float) -> str:
    return str(value) if abs(value) < 1e30 else "too large"


def _check_stop(request: SamplingFields) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    if len(stops) > openai.MAX_STOPS:
        raise InvalidRequestError(f"`stop` may hold at most {openai.MAX_STOPS} strings.", param="stop")
    if any(not 1 <= len(stop) <= openai.MAX_STOP_CHARS for stop in stops):
        raise InvalidRequestError(
            f"Each `stop` string must have 1 to {openai.MAX_STOP_CHARS} characters.", param="stop"
        )
    request.stop = stops


def _check_stop_tokens(request: SamplingFields) -> None:
    if len(request.stop_token_ids) > _MAX_STOP_TOKENS:
        raise InvalidRequestError(f"`stop_token_ids` may hold at most {_MAX_STOP_TOKENS} ids.", param="stop_token_ids")


def _check_min_tokens(request: SamplingFields) -> None:
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise InvalidRequestError("`min_tokens` must not be above `max_tokens`.", param="min_tokens")


def _check_logit_bias(request: SamplingFields) -> None:
    if len(request.logit_bias) > openai.MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"`logit_bias` may hold at most {openai.MAX_LOGIT_BIAS} tokens.", param="logit_bias")
    for token_id, bias in request.logit_bias.items():
        if _TOKEN_ID.fullmatch(token_id) is None:
            raise InvalidRequestError("The keys of `logit_bias` must be token ids.", param="logit_bias")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidRequestError(
                f"The values of `logit_bias` must be from -{_MAX_BIAS} to {_MAX_BIAS}.", param="logit_bias"
            )


def _check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is None:
        return
    if not request.stream:
        raise InvalidRequestError("`stream_options` needs `stream` to be true.", param="stream_options")
    if request.stream_options.include_obfuscation:
        raise UnsupportedParameterError(
            "`stream_options.include_obfuscation` is not supported here; leave it out or send false.",
            param="stream_options",
        )


def _check_metadata(request: SamplingFields) -> None:
    metadata = request.metadata or {}
    if len(metadata) > openai.MAX_METADATA:
        raise InvalidRequestError(f"`metadata` may hold at most {openai.MAX_METADATA} pairs.", param="metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY_CHARS or len(value) > _MAX_METADATA_VALUE_CHARS:
            raise InvalidRequestError(
                f"`metadata` keys may have {_MAX_METADATA_KEY_CHARS} characters, values {_MAX_METADATA_VALUE_CHARS}.",
                param="metadata",
            )


_CHECKS: tuple[Callable[[SamplingFields], None], ...] = (
    _check_stop,
    _check_stop_tokens,
    _check_min_tokens,
    _check_logit_bias,
    _check_stream_options,
    _check_metadata,
)
