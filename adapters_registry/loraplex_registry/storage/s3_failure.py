"""What the answers of an S3 server mean: not there, or the store is unavailable, in one line without secrets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from urllib3.exceptions import HTTPError

from loraplex_registry.errors import StoreUnavailableError

_log = logging.getLogger(__name__)
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "403", "ExpiredToken", "InvalidToken"}
)


class KeyMissingError(Exception):
    """There is no object of this key; never leaves the store."""


class KeyBusyError(Exception):
    """Another writes the same key right now; never leaves the bucket."""


class KeyTakenError(Exception):
    """An object that must not be there is there; never leaves the store."""


@contextmanager
def translated_failures(*, is_conditional: bool = False) -> Iterator[None]:
    """Turn what boto3 raises into errors of ours.

    Raises:
        KeyMissingError: The object is not there.
        KeyTakenError: A condition of the request does not hold.
        KeyBusyError: Whether it holds is not decided yet; only where `is_conditional`.
        StoreUnavailableError: Anything else; the log says what.
    """
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _MISSING:
            raise KeyMissingError from error
        if code in ("PreconditionFailed", "412"):
            raise KeyTakenError from error
        if is_conditional and code in ("ConditionalRequestConflict", "409"):
            raise KeyBusyError from error
        raise _unavailable(_explain(code), f"{error.operation_name}: {code}") from error
    except NoCredentialsError as error:
        raise _unavailable("this server has no credentials for it", "set AWS_ACCESS_KEY_ID") from error
    except (BotoCoreError, HTTPError) as error:
        raise _unavailable("it does not answer", type(error).__name__) from error
    # botocore reads what the server says of itself, and fails as that leads it; so do we
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _unavailable("its answer cannot be read", type(error).__name__) from error


def _explain(code: str) -> str:
    if code in _CREDENTIALS:
        return f"it refuses this server's credentials ({code})"
    if code == "NoSuchBucket":
        return "its bucket does not exist"
    return f"it answers {code}"


def _unavailable(reason: str, detail: str) -> StoreUnavailableError:
    _log.error("the object store cannot be used: %s (%s)", reason, detail)
    return StoreUnavailableError(f"The object store cannot be used: {reason}; try again in a moment, or tell an admin")
