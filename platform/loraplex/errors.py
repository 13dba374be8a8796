"""The gateway's errors. Each class docstring is the default message and says what to do; `code` is the slug.

LoraplexError
    InvalidRequestError
        InvalidJsonError, InvalidNameError, UnknownParameterError, UnsupportedParameterError
    AuthenticationError
    PermissionDeniedError
        TenantSuspendedError
    NotFoundError
        ModelNotFoundError, UseChatCompletionsError, EmbeddingsNotServedError
    ConflictError
        NameReservedError, AdapterQuarantinedError
    IdempotencyReusedError
    AdapterRetiredError
    RateLimitExceededError
        QuotaExceededError
    BodyTimeoutError, PayloadTooLargeError, UnsupportedMediaTypeError
    UnavailableError
        AdapterLoadingError, NoReplicaError, DrainingError
    ReplicaFailedError
    DeadlineExceededError
    StartError
        SettingsError, DatabaseRevisionError, DatabaseInUseError
"""

from __future__ import annotations


class LoraplexError(Exception):
    """Something failed inside the gateway; try again, and report the request id if it stays."""

    code = "internal_error"

    def __init__(
        self, message: str | None = None, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        self.message = message or " ".join((type(self).__doc__ or "").split())
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


class InvalidRequestError(LoraplexError):
    """The request is not valid; the message names the field."""

    code = "invalid_request_error"


class InvalidJsonError(InvalidRequestError):
    """The body is not a JSON object in UTF-8; check quoting and escapes."""

    code = "invalid_json"


class InvalidNameError(InvalidRequestError):
    """A name is 1 to 63 of a-z, 0-9 and '-', and starts and ends with a letter or digit."""

    code = "invalid_name"


class UnknownParameterError(InvalidRequestError):
    """Nobody knows this parameter; check its spelling."""

    code = "unknown_parameter"


class UnsupportedParameterError(InvalidRequestError):
    """This parameter is known but not supported here; leave it out."""

    code = "unsupported_parameter"


class AuthenticationError(LoraplexError):
    """The API key is missing or not valid; send it as 'Authorization: Bearer lpx_...'."""

    code = "invalid_api_key"


class PermissionDeniedError(LoraplexError):
    """This key may not do that; ask for a key with the scope that the message names."""

    code = "permission_denied"


class TenantSuspendedError(PermissionDeniedError):
    """This tenant is suspended; ask the platform's administrators."""

    code = "tenant_suspended"


class NotFoundError(LoraplexError):
    """There is no such thing, or it is not yours; list what exists to see its name."""

    code = "not_found"


class UseChatCompletionsError(NotFoundError):
    """The Responses API is not served here; use POST /v1/chat/completions."""

    code = "use_chat_completions"


class EmbeddingsNotServedError(NotFoundError):
    """Embeddings are not served here: the bases generate text; use a server with an embedding model for this route."""

    code = "embeddings_not_served"


class ModelNotFoundError(NotFoundError):
    """There is no such model, or it is not yours; GET /v1/models lists what this key may call."""

    code = "model_not_found"


class ConflictError(LoraplexError):
    """The current state does not allow this; the message says what stands in the way."""

    code = "conflict"


class NameReservedError(ConflictError):
    """This name is reserved; choose another."""

    code = "name_reserved"


class AdapterQuarantinedError(ConflictError):
    """This version is quarantined; its report says why, and an admin can release it."""

    code = "adapter_quarantined"


class IdempotencyReusedError(LoraplexError):
    """This Idempotency-Key was used for other content; choose a new one."""

    code = "idempotency_key_reused"


class AdapterRetiredError(LoraplexError):
    """This version is retired; restore it or call another."""

    code = "adapter_retired"


class RateLimitExceededError(LoraplexError):
    """A limit on calls has no room; try again after the seconds in Retry-After."""

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str | None = None, *, retry_after_s: int | None = 1, headers: dict[str, str] | None = None
    ) -> None:
        self.headers = headers or {}
        super().__init__(message, retry_after_s=retry_after_s)


class QuotaExceededError(RateLimitExceededError):
    """What may be used this day or month is used up; it begins anew with the next one, in UTC."""

    code = "quota_exceeded"


class BodyTimeoutError(LoraplexError):
    """The body did not arrive: 30 seconds passed without a byte; send it again."""

    code = "request_timeout"


class PayloadTooLargeError(LoraplexError):
    """The body is larger than allowed here."""

    code = "payload_too_large"


class UnsupportedMediaTypeError(LoraplexError):
    """Send JSON with 'Content-Type: application/json'."""

    code = "unsupported_media_type"


class UnavailableError(LoraplexError):
    """The gateway cannot answer for the moment; try again shortly."""

    code = "unavailable"

    def __init__(self, message: str | None = None, *, param: str | None = None, retry_after_s: int | None = 1) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class AdapterLoadingError(UnavailableError):
    """This adapter is not ready yet; try again shortly."""

    code = "adapter_loading"


class NoReplicaError(UnavailableError):
    """No engine serves this model at the moment; try again shortly."""

    code = "no_replica"


class DrainingError(UnavailableError):
    """The gateway is shutting down; send the request again."""

    code = "draining"


class ReplicaFailedError(LoraplexError):
    """The engine failed while it answered; send the request again."""

    code = "replica_failed"


class DeadlineExceededError(LoraplexError):
    """The request took longer than its time limit; ask for fewer tokens or raise x-request-timeout."""

    code = "deadline_exceeded"


class StartError(LoraplexError):
    """The gateway cannot start."""

    code = "start_failed"
    exit_code = 2


class SettingsError(StartError):
    """A setting is missing or not valid; the message names it."""

    code = "invalid_setting"


class DatabaseRevisionError(StartError):
    """The database is not at the revision that this program needs; run: loraplex db upgrade."""

    code = "database_revision"
    exit_code = 3


class DatabaseInUseError(StartError):
    """Another gateway runs on this database: give all of them LORAPLEX_REDIS_URL and Postgres, or stop the other."""

    code = "database_in_use"
    exit_code = 3
