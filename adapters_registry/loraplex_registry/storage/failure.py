"""What a disk that fails means: the store is unavailable, whoever was writing to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex_registry.errors import StoreUnavailableError

_log = logging.getLogger(__name__)


@contextmanager
def unavailable_on_failure() -> Iterator[None]:
    """Turn what the operating system refuses into an error of ours, and tell the operator in one line.

    Raises:
        StoreUnavailableError: An OSError was raised inside.
    """
    try:
        yield
    except OSError as error:
        _log.error("the object store cannot be written: %s", error.strerror)
        raise StoreUnavailableError(f"The object store cannot be written: {error.strerror}") from error
