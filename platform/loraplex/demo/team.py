"""The teams of the demonstration, set up as an administrator would: a tenant, a key and an upload each, over REST."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import loraplex
from loraplex.client.errors import ClientError
from loraplex.client.management import Management
from loraplex.client.upload import list_files
from loraplex.supervisor.errors import UpError
from loraplex_registry.wire.adapter import VersionView

_LONGEST_WAIT_S = 300
"""Until an engine has measured an adapter; it takes what the rest of the machine leaves it."""

STYLES = ("pirate", "json", "legal")
"""Folders of the example adapters, one a team."""


@dataclass(frozen=True)
class Team:
    """A tenant with one live adapter; `key` calls it."""

    name: str
    key: str = field(repr=False)
    version: VersionView


def examples_folder() -> Path:
    """Return where the example adapters lie: inside the installed package, else in the source tree.

    Raises:
        UpError: They are in neither.
    """
    package = Path(loraplex.__file__).parent
    for folder in (package / "_examples" / "adapters", package.parents[1] / "examples" / "adapters"):
        if folder.is_dir():
            return folder
    raise UpError("The example adapters are not here; run the demonstration from a clone of the repository.")


def create_team(client: Management, style: str) -> Team:
    """Create `team-STYLE`, its key and a version of its default adapter; what a kept data folder has already stays."""
    name = f"team-{style}"
    try:
        client.create_tenant(name, display_name=f"Team {style.capitalize()}")
    except ClientError as error:
        if error.code != "conflict":
            raise
    key = client.create_key(name, "demo", owner="demo")
    files = list_files(examples_folder() / style)
    version = client.push(name, "default", files, lambda _: None, wait=_LONGEST_WAIT_S)
    assert key.key, "the answer that creates a key holds it"
    return Team(name, key.key, version)
