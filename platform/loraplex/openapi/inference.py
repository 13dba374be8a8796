"""The operations under /v1, in OpenAI's shapes."""

from __future__ import annotations

from loraplex.openapi.operation import Answer, Body, Operation, Parameter
from loraplex.openapi.schema import Schema, ref

_MODEL_CODES = (
    "model_not_found",
    "adapter_quarantined",
    "adapter_retired",
)
_ENGINE_CODES = (
    *_MODEL_CODES,
    "context_length_exceeded",
    "invalid_grammar",
    "alora_invocation_missing",
    "queue_full",
    "rate_limit_exceeded",
    "quota_exceeded",
    "adapter_loading",
    "digest_mismatch",
    "no_replica",
    "draining",
    "replica_failed",
    "adapter_output_invalid",
    "deadline_exceeded",
)
_EVENTS = "text/event-stream"
_STREAM: Schema = {"type": "string", "description": "Events `data: {…}`, the last one `data: [DONE]`, or an error."}
_SECONDS: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 3600, "default": 600}
_TIMEOUT = Parameter("x-request-timeout", "header", _SECONDS, "Seconds that the request may take")
_CANARY = Parameter(
    "x-loraplex-canary-key", "header", {"type": "string", "pattern": "^[!-~]{1,200}$"}, "Decides the side of a canary"
)
_HEADERS: dict[str, Schema] = {
    "x-loraplex-model": {"type": "string"},
    "x-loraplex-digest": {"type": "string"},
    "x-loraplex-replica": {"type": "string"},
}
_LIMITS: dict[str, Schema] = {
    f"x-ratelimit-{what}-{unit}": {"type": "string"}
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
}
"""Of calls that a limit counts."""
_ELSEWHERE = {
    "/v1/embeddings": ("Embeddings", "embeddings_not_served"),
    "/v1/responses": ("Responses", "use_chat_completions"),
    "/v1/responses/{rest}": ("ResponsesBelow", "use_chat_completions"),
}


def _generate(path: str, name: str, summary: str, body: str, answer: str) -> Operation:
    return Operation(
        method="post",
        path=path,
        name=name,
        tag="inference",
        summary=summary,
        answers=(
            Answer(
                200,
                "The answer, or its stream",
                ref(answer),
                headers=_HEADERS,
                optional_headers=_LIMITS,
                other_media={_EVENTS: _STREAM},
            ),
        ),
        codes=_ENGINE_CODES,
        parameters=(_TIMEOUT, _CANARY),
        body=Body(ref(body)),
    )


def _refuse(path: str, method: str, name: str, code: str) -> Operation:
    rest = (Parameter("rest", "path", {"type": "string"}),) if "{rest}" in path else ()
    return Operation(
        method=method,  # type: ignore[arg-type]
        path=path,
        name=f"{method}{name}",
        tag="not served",
        summary="Not served; the error says what to use instead",
        answers=(),
        codes=(code,),
        parameters=rest,
    )


INFERENCE: tuple[Operation, ...] = (
    _generate("/v1/chat/completions", "chat", "Answer a chat", "ChatRequest", "ChatCompletion"),
    _generate("/v1/completions", "complete", "Continue a prompt", "CompletionRequest", "Completion"),
    Operation(
        method="post",
        path="/v1/tokenize",
        name="tokenize",
        tag="inference",
        summary="The tokens of a prompt or a chat",
        answers=(Answer(200, "The tokens", ref("TokenizeResponse"), headers=_HEADERS),),
        codes=_ENGINE_CODES,
        parameters=(_TIMEOUT, _CANARY),
        body=Body(ref("TokenizeRequest")),
    ),
    Operation(
        method="get",
        path="/v1/models",
        name="listModels",
        tag="inference",
        summary="List what the key may call",
        answers=(Answer(200, "All models", ref("Models")),),
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        name="showModel",
        tag="inference",
        summary="Show one model; its name may hold `/`, `@` and `:`, raw or percent-encoded",
        answers=(Answer(200, "The model", ref("Model")),),
        codes=_MODEL_CODES,
        parameters=(Parameter("model", "path", {"type": "string", "minLength": 1}),),
    ),
    *(
        _refuse(path, method, name, code)
        for path, (name, code) in _ELSEWHERE.items()
        for method in ("get", "post", "delete")
    ),
)
