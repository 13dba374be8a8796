"""Judges the bodies of the routes that generate or tokenise: names, types, ranges, and what goes with what.

Nothing is accepted and ignored. `param` of every refusal is the top-level field.
"""

from __future__ import annotations

from typing import Any

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.field.convert import convert
from loraplex_engine.server.field.message import check_messages, with_messages
from loraplex_engine.server.field.sampling import check_sampling
from loraplex_engine.wire.field import NEUTRAL_CHAT, NEUTRAL_COMPLETION, NEUTRAL_TOKENIZE, is_same_best_of
from loraplex_engine.wire.openai import ChatRequest, CompletionRequest, TokenizeRequest


def read_chat(body: dict[str, Any]) -> ChatRequest:
    """Return the checked request of /v1/chat/completions.

    Raises:
        InvalidRequestError: A field has a wrong type or range, is unknown, or is not built; `param` names it.
    """
    request = convert(with_messages(body), ChatRequest, NEUTRAL_CHAT)
    check_sampling(request)
    check_messages(request.messages)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    if request.parallel_tool_calls is not None and not request.tools:
        raise InvalidRequestError("`parallel_tool_calls` needs `tools`.", param="parallel_tool_calls")
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequestError(
                "`max_tokens` and `max_completion_tokens` differ; send one of them.", param="max_completion_tokens"
            )
        request.max_tokens = request.max_completion_tokens
    return request


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    """Return the checked request of /v1/completions; its prompts are checked with the tokenizer. Raises as above."""
    body = {name: value for name, value in body.items() if not is_same_best_of(name, body)}
    request = convert(body, CompletionRequest, NEUTRAL_COMPLETION)
    # an echoed prompt is an answer without any token
    check_sampling(request, least_tokens=0 if request.echo else 1)
    return request


def read_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    """Return the checked request of /v1/tokenize. Raises as above."""
    request = convert(with_messages(body), TokenizeRequest, NEUTRAL_TOKENIZE)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Send either `prompt` or `messages`.", param="prompt")
    if request.messages is not None:
        check_messages(request.messages)
    return request
