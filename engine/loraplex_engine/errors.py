"""What can go wrong in the engine, as types.

EngineError
├── ConfigError             config_invalid
├── BaseUnsupportedError    base_unsupported
├── BaseUnavailableError    base_unavailable
├── StartupError            does_not_start
└── RequestError            (ends one request, never its neighbours)
    ├── QueueFullError          queue_full
    ├── LoadTimeoutError        adapter_loading
    ├── LoadFailedError         adapter_loading
    ├── DigestMismatchError     digest_mismatch
    ├── OutputInvalidError      adapter_output_invalid
    ├── TooLargeForCacheError   context_length_exceeded
    └── DrainingError           draining

The slug `code` is what the API answers as `error.code`; the server maps it to a status.
"""

from __future__ import annotations


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


class RequestError(EngineError):
    """The request ended with an error."""

    retry_after_s: int | None = None


class QueueFullError(RequestError):
    """The request waited in the engine's queue until its limit; try again later."""

    code = "queue_full"
    retry_after_s = 1


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


class TooLargeForCacheError(RequestError):
    """The request needs more KV cache than the engine has; shorten it or raise --kv-cache-memory-bytes."""

    code = "context_length_exceeded"


class DrainingError(RequestError):
    """The engine is shutting down; send the request to another replica."""

    code = "draining"
    retry_after_s = 5
