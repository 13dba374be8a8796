"""The connection of one command: found from the environment, opened for the length of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.client.connection import Connection
from loraplex.client.location import find_location
from loraplex.client.management import Management


@contextmanager
def open_management() -> Iterator[Management]:
    """Yield the management client that LORAPLEX_URL and LORAPLEX_API_KEY or the local platform give.

    Raises:
        NoKeyError: No key is known.
    """
    location = find_location(os.environ)
    location.require_key()
    with Connection(location) as connection:
        yield Management(connection)
