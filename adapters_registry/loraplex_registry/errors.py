"""The registry's errors. Each class docstring is the default message and says what to do; `code` is the slug.

RegistryError
    TokenError, PermissionDeniedError
    InvalidRequestError
        InvalidJsonError, InvalidNameError, UnsupportedParameterError, UnknownParameterError
    NotFoundError
    ConflictError
        PreconditionFailedError, PreconditionRequiredError, QuarantinedError
        IdempotencyRunningError, IdempotencyReusedError, NameReservedError
    RetiredError
    QuotaExceededError
    PayloadTooLargeError, UnsupportedMediaTypeError, BodyTimeoutError
    AdapterRejectedError
    SettingError, MigrationError
    UnavailableError
        StoreUnavailableError
    ArtifactError
        ArtifactMissingError
        ArtifactDamagedError
"""

from __future__ import annotations

from typing import Any


class RegistryError(Exception):
    """The registry could not do this."""

    code = "internal_error"

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        self.message = message or " ".join((type(self).__doc__ or "").split())
        self.param = param
        super().__init__(self.message)


class TokenError(RegistryError):
    """The identity token is missing, expired or not signed by a known key; send the request through the gateway."""

    code = "invalid_api_key"


class PermissionDeniedError(RegistryError):
    """This key lacks the scope for that; ask for a key that has it."""

    code = "permission_denied"


class InvalidRequestError(RegistryError):
    """The request is not valid; the message names the field."""

    code = "invalid_request_error"


class InvalidJsonError(InvalidRequestError):
    """The body is not valid JSON; send one JSON object in UTF-8."""

    code = "invalid_json"


class InvalidNameError(InvalidRequestError, ValueError):
    """A name is 1 to 63 of a-z, 0-9 and '-', and starts and ends with a letter or digit."""

    code = "invalid_name"


class UnsupportedParameterError(InvalidRequestError):
    """This parameter is known but not supported here; leave it out."""

    code = "unsupported_parameter"


class UnknownParameterError(InvalidRequestError):
    """Nobody knows this parameter; check its spelling."""

    code = "unknown_parameter"


class NotFoundError(RegistryError):
    """There is no such thing, or it is not yours; list what exists to see its name."""

    code = "not_found"


class ConflictError(RegistryError):
    """The current state does not allow this; the message says what stands in the way."""

    code = "conflict"


class PreconditionFailedError(ConflictError):
    """The alias has changed since it was read; read it again and repeat with its new ETag."""

    code = "precondition_failed"

    def __init__(self, message: str | None = None, *, current: Any = None, revision: int | None = None) -> None:
        super().__init__(message, param="If-Match")
        self.current = current
        self.revision = revision


class PreconditionRequiredError(ConflictError):
    """Say which revision you have seen: send If-Match with its ETag, or If-None-Match: * to create."""

    code = "precondition_required"


class QuarantinedError(ConflictError):
    """This content is quarantined; an admin must release it first."""

    code = "adapter_quarantined"


class IdempotencyRunningError(ConflictError):
    """A request with this Idempotency-Key is still running; wait for it and repeat."""


class IdempotencyReusedError(RegistryError):
    """This Idempotency-Key was used for other content; choose a new one."""

    code = "idempotency_key_reused"


class NameReservedError(ConflictError):
    """This name is taken by something else; choose another."""

    code = "name_reserved"


class RetiredError(RegistryError):
    """This version is retired; restore it or name another."""

    code = "adapter_retired"


class QuotaExceededError(RegistryError):
    """The tenant may store no more; the message says which of its limits is reached."""

    code = "quota_exceeded"


class PayloadTooLargeError(RegistryError):
    """The body is larger than allowed here."""

    code = "payload_too_large"


class UnsupportedMediaTypeError(RegistryError):
    """The content type is not understood here; send multipart/form-data for uploads and application/json else."""

    code = "unsupported_media_type"


class BodyTimeoutError(RegistryError):
    """The body stopped arriving; send it again, on a connection that keeps moving."""

    code = "request_timeout"


class AdapterRejectedError(RegistryError):
    """The adapter cannot be served exactly and was refused; the report names each failing check."""

    code = "adapter_rejected"

    def __init__(self, report: Any, message: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.report = report


class SettingError(RegistryError):
    """A setting is not valid; the message names it."""

    code = "invalid_setting"


class MigrationError(RegistryError):
    """The database is not at the revision this program needs; run `loraplex db upgrade`."""

    code = "database_revision"


class UnavailableError(RegistryError):
    """The database does not answer; try again in a moment."""

    code = "unavailable"


class StoreUnavailableError(UnavailableError):
    """The object store does not answer; try again in a moment."""

    code = "store_unavailable"


class ArtifactError(RegistryError):
    """The artifact could not be fetched from the registry."""

    code = "artifact_unavailable"


class ArtifactMissingError(ArtifactError):
    """The registry has no artifact of this digest."""

    code = "artifact_missing"


class ArtifactDamagedError(ArtifactError):
    """What the registry sends of this artifact is damaged."""

    code = "artifact_damaged"
