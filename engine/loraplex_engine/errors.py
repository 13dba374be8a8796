"""What can go wrong in the engine, as types.

EngineError
├── ConfigError             config_invalid
├── BaseUnsupportedError    base_unsupported
├── BaseUnavailableError    base_unavailable
├── StartupError            does_not_start
├── UnreachableError        no_replica      (raised in the gateway by the engine's client)
├── EngineRefusedError      (the same; `code` is that of the engine's answer)
├── CallError               (a call over HTTP is refused before it runs; names the field in `param`)
│   ├── InvalidRequestError     invalid_request_error
│   │   ├── InvalidJsonError        invalid_json
│   │   ├── UnsupportedParameterError   unsupported_parameter
│   │   ├── UnknownParameterError   unknown_parameter
│   │   └── ContextLengthError      context_length_exceeded
│   ├── InvalidTokenError       invalid_api_key
│   ├── PermissionDeniedError   permission_denied
│   ├── ModelNotFoundError      model_not_found
│   ├── NotFoundError           not_found
│   │   ├── UseChatCompletionsError     use_chat_completions
│   │   └── EmbeddingsNotServedError    embeddings_not_served
│   ├── ConflictError           conflict
│   ├── PayloadTooLargeError    payload_too_large
│   ├── BodyTimeoutError        request_timeout
│   ├── MediaTypeError          unsupported_media_type
│   └── NotReadyError           unavailable
└── RequestError            (ends one request, never its neighbours)
    ├── QueueFullError          queue_full
    ├── LoadTimeoutError        adapter_loading
    ├── LoadFailedError         adapter_loading
    ├── DigestMismatchError     digest_mismatch
    ├── OutputInvalidError      adapter_output_invalid
    ├── AdapterQuarantinedError adapter_quarantined
    ├── InvocationMissingError  alora_invocation_missing
    ├── GrammarError            invalid_grammar
    ├── TooLargeForCacheError   context_length_exceeded
    ├── StepFailedError         internal_error
    ├── DeadlineError           deadline_exceeded
    ├── ReplicaFailedError      replica_failed
    ├── ClientGoneError         cancelled       (nobody reads the answer any more)
    └── DrainingError           draining

The slug `code` is what the API answers as `error.code`; the server maps it to a status.
"""

from __future__ import annotations

from collections.abc import Sequence


class EngineError(Exception):
    """The engine met a problem; see the message for what to do."""

    code = "internal_error"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").split("\n", 1)[0])


class ConfigError(EngineError):
    """A setting of the engine has a value that it cannot use."""

    code = "config_invalid"


class BaseUnsupportedError(EngineError):
    """This base model's architecture is not served."""

    code = "base_unsupported"


class BaseUnavailableError(EngineError):
    """The base model could not be found or fetched; pull it with `loraplex base pull SPEC`."""

    code = "base_unavailable"


class StartupError(EngineError):
    """The engine cannot start with these settings on this machine."""

    code = "does_not_start"


class UnreachableError(EngineError):
    """No connection to this engine; it has seen nothing of the request, so another replica may take it."""

    code = "no_replica"


class EngineRefusedError(EngineError):
    """The engine refused a call of the platform; `code` and the message are those of its answer."""

    def __init__(self, code: str, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class RequestError(EngineError):
    """The request ended with an error."""

    retry_after_s: int | None = None
    param: str | None = None
    """The field at fault, where there is one."""


class QueueFullError(RequestError):
    """The request waited in the engine's queue until its limit; try again later."""

    code = "queue_full"
    retry_after_s = 1


class DeadlineError(RequestError):
    """The request took longer than its x-request-timeout."""

    code = "deadline_exceeded"


class LoadTimeoutError(RequestError):
    """The adapter did not finish loading in time; try again in a moment."""

    code = "adapter_loading"
    retry_after_s = 2


class LoadFailedError(RequestError):
    """The adapter could not be loaded and will be tried again; retry in a moment."""

    code = "adapter_loading"
    retry_after_s = 2


class DigestMismatchError(RequestError):
    """The adapter's bytes do not match its digest; upload it again."""

    code = "digest_mismatch"
    retry_after_s = 5


class OutputInvalidError(RequestError):
    """The adapter produced non-finite numbers for this request; check the adapter's training."""

    code = "adapter_output_invalid"


class AdapterQuarantinedError(RequestError):
    """This replica no longer serves the adapter; upload it again as a new version."""

    code = "adapter_quarantined"


class InvocationMissingError(RequestError):
    """The prompt lacks the adapter's invocation tokens; it acts only from there on, so add them to the prompt."""

    code = "alora_invocation_missing"

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> InvocationMissingError:
        """The error that names the tokens, or the first of them."""
        shown = ", ".join(map(str, token_ids[:16])) + (", ..." if len(token_ids) > 16 else "")
        return cls(f"The prompt lacks the tokens that invoke this adapter ({shown}); it acts only from there on.")


class GrammarError(RequestError):
    """The grammar that the answer must match cannot be followed with this model; make it simpler."""

    code = "invalid_grammar"


class TooLargeForCacheError(RequestError):
    """The request needs more KV cache than the engine has; shorten it or raise --kv-cache-memory-bytes."""

    code = "context_length_exceeded"


class StepFailedError(RequestError):
    """The engine failed while it computed this request; try again, and see its log."""

    code = "internal_error"


class DrainingError(RequestError):
    """The engine is shutting down; send the request to another replica."""

    code = "draining"
    retry_after_s = 5


class ReplicaFailedError(RequestError):
    """The engine's core stopped while it worked on this request; send the request again."""

    code = "replica_failed"


class ClientGoneError(RequestError):
    """The client went away, stopped reading, or asked for the end; the request was aborted."""

    code = "cancelled"


class CallError(EngineError):
    """The call was refused; the message says why."""

    retry_after_s: int | None = None

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(CallError):
    """The request is not valid; the message names the field."""

    code = "invalid_request_error"


class InvalidJsonError(InvalidRequestError):
    """The body is not one strict JSON object in UTF-8; check what was sent."""

    code = "invalid_json"


class UnsupportedParameterError(InvalidRequestError):
    """This parameter is known but not supported here; leave it out."""

    code = "unsupported_parameter"


class UnknownParameterError(InvalidRequestError):
    """Nobody knows this parameter; check its spelling."""

    code = "unknown_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together are longer than the model's context; shorten one of them."""

    code = "context_length_exceeded"


class InvalidTokenError(CallError):
    """The identity token is missing, expired or not signed by a known key; send the request through the gateway."""

    code = "invalid_api_key"


class PermissionDeniedError(CallError):
    """This identity was not made for this call."""

    code = "permission_denied"


class ModelNotFoundError(CallError):
    """This engine serves no such model; name its base or the digest of an adapter version."""

    code = "model_not_found"


class NotFoundError(CallError):
    """There is no such thing here; check the path and the id."""

    code = "not_found"


class UseChatCompletionsError(NotFoundError):
    """The Responses API is not served here; use POST /v1/chat/completions."""

    code = "use_chat_completions"


class EmbeddingsNotServedError(NotFoundError):
    """Embeddings are not served here: the bases generate text; use a server with an embedding model for this route."""

    code = "embeddings_not_served"


class ConflictError(CallError):
    """The current state does not allow this; the message says what stands in the way."""

    code = "conflict"


class PayloadTooLargeError(CallError):
    """The body is larger than 4 MiB; send a shorter request."""

    code = "payload_too_large"


class BodyTimeoutError(CallError):
    """The body did not arrive in time; send it without pauses."""

    code = "request_timeout"


class MediaTypeError(CallError):
    """The content type is not understood here; send application/json."""

    code = "unsupported_media_type"


class NotReadyError(CallError):
    """The engine is still loading its base model; try again in a moment."""

    code = "unavailable"
    retry_after_s = 2
