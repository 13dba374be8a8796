"""Ranges and limits of the fields that both generation routes share."""

from __future__ import annotations

import re
from collections.abc import Callable

from loraplex_engine.errors import InvalidRequestError, UnsupportedParameterError
from loraplex_engine.wire import openai
from loraplex_engine.wire.misfit import show
from loraplex_engine.wire.openai import SamplingFields

LENGTHS = ("max_completion_tokens", "max_tokens")
"""Fields that say how long an answer may be."""
_MAX_STOP_TOKENS = 64
_MAX_BIAS = 100
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_MAX_METADATA_KEY_CHARS, _MAX_METADATA_VALUE_CHARS = 64, 512
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
    ("prompt_logprobs", 0, openai.MAX_TOP_LOGPROBS),
)


def check_sampling(request: SamplingFields, *, least_tokens: int = 1) -> None:
    """Refuse values out of range; make `stop` a list.

    Args:
        request: As converted.
        least_tokens: The lowest `max_tokens`.

    Raises:
        InvalidRequestError: `param` names the field.
    """
    for name, low, high in _RANGES:
        value = getattr(request, name, None)
        low = least_tokens if name == "max_tokens" else low
        if value is not None and not low <= value <= high:
            limit = f"from {low} to {high}" if high != float("inf") else f"at least {low}"
            raise InvalidRequestError(f"`{name}` is {_show_number(value)}, but must be {limit}.", param=name)
    if request.top_p == 0:
        raise InvalidRequestError("`top_p` must be above 0.", param="top_p")
    for check in _CHECKS:
        check(request)


def _show_number(value: float) -> str:
    if abs(value) >= 1e30:
        return "too large"
    return str(int(value) if value == int(value) else value)


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
    for name in LENGTHS:
        most = getattr(request, name, None)
        if most is not None and request.min_tokens > most:
            raise InvalidRequestError(f"`min_tokens` must not be above `{name}`.", param="min_tokens")


def _check_logit_bias(request: SamplingFields) -> None:
    if len(request.logit_bias) > openai.MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"`logit_bias` may hold at most {openai.MAX_LOGIT_BIAS} tokens.", param="logit_bias")
    for token_id, bias in request.logit_bias.items():
        if _TOKEN_ID.fullmatch(token_id) is None:
            raise InvalidRequestError(f"The key {show(token_id)} of `logit_bias` is no token id.", param="logit_bias")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidRequestError(
                f"`logit_bias[{show(token_id)}]` is {_show_number(bias)}, but must be from -{_MAX_BIAS} to "
                f"{_MAX_BIAS}.",
                param="logit_bias",
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


def _check_salt(request: SamplingFields) -> None:
    if len(request.cache_salt) > openai.MAX_SALT_CHARS:
        raise InvalidRequestError(
            f"`cache_salt` may have at most {openai.MAX_SALT_CHARS} characters.", param="cache_salt"
        )


_CHECKS: tuple[Callable[[SamplingFields], None], ...] = (
    _check_stop,
    _check_stop_tokens,
    _check_min_tokens,
    _check_logit_bias,
    _check_stream_options,
    _check_metadata,
    _check_salt,
)
