"""`loraplex status`: whether the platform answers, and what this key may call there."""

from __future__ import annotations

import os

from loraplex.cli.output import AsJson, print_facts, print_json, print_table
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.client.location import find_location
from loraplex.client.management import Management


def status(*, as_json: AsJson = False) -> int:
    """Say whether the platform is ready and which models this key may call; the exit code is 1 if it is not ready.

    Args:
        as_json: Print JSON for programs.
    """
    location = find_location(os.environ)
    with Connection(location) as connection:
        is_ready = _is_ready(connection)
        models = Management(connection).list_models() if location.key and is_ready else []
    if as_json:
        print_json({"url": location.url, "is_ready": is_ready, "has_key": bool(location.key), "models": models})
        return 0 if is_ready else 1
    print_facts({"url": location.url, "ready": is_ready, "key": "known" if location.key else "none"})
    print_table(
        "Models",
        ("model", "version", "base", "of"),
        ((model.id, model.root, model.parent, model.owned_by) for model in models),
        empty="No models to show: this needs a key that may call some.",
    )
    return 0 if is_ready else 1


def _is_ready(connection: Connection) -> bool:
    try:
        connection.send("GET", "/readyz")
    except ClientError as error:
        if not error.status:
            raise
        return False
    return True
