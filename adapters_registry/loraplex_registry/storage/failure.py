"""What a disk that fails means: the store is unavailable, whoever was writing to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex_registry.errors import StoreUnavailableError

_log = logging.getLogger(__name__)


@contextmanager
def unavailable_on_failure(*, missing_is: type[FileNotFoundError] | None = None) -> Iterator[None]:
    """Turn what the operating system refuses into an error of ours, and tell the operator in one line.

    Args:
        missing_is: An error that means that something is not there, and passes as it is.

    Raises:
        StoreUnavailableError: An OSError was raised inside.
    """
    try:
        yield
    except OSError as error:
        if missing_is is not None and isinstance(error, missing_is):
            raise
        _log.error("the object store cannot be written: %s", error.strerror)
        raise StoreUnavailableError(f"The object store cannot be written: {error.strerror}") from error
