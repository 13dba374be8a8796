"""The base model of a platform: fetched by the engine's own program, then made known to the registry."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loraplex.client.connection import Connection, decode
from loraplex.client.location import Location
from loraplex.client.types import Base
from loraplex.supervisor.engine_program import FOR_FETCHING, check_engine_installed
from loraplex.supervisor.errors import UpError
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.peft.unreadable import UNREADABLE

SPEC_FILE = "base.json"


@dataclass(frozen=True)
class PulledBase:
    """A base in the cache."""

    folder: Path
    spec: BaseSpec

    def limit_rank(self, max_lora_rank: int) -> PulledBase:
        """Return the base as the registry shall know it: adapters up to the rank that its engine serves."""
        return PulledBase(self.folder, msgspec.structs.replace(self.spec, max_lora_rank=max_lora_rank))


class _PullResult(msgspec.Struct):
    folder: str


async def pull_base(spec: str, served_name: str, env: dict[str, str]) -> PulledBase:
    """Fetch a base unless the cache has it; progress goes to standard error.

    Args:
        spec: Folder, hub id, .gguf file or name.
        served_name: Name of the base in the API; empty takes the one that follows from `spec`.
        env: Environment of the engine's program, with the cache's place.

    Raises:
        UpError: It could not be had; the engine's program has said why.
    """
    check_engine_installed(FOR_FETCHING)
    argv: tuple[str, ...] = (sys.executable, "-m", "loraplex_engine", "pull", spec, "--json")
    argv += ("--served-model-name", served_name) if served_name else ()
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise UpError(f"The base {spec!r} could not be fetched. Try `loraplex base pull {spec}` alone.")
    result = msgspec.json.decode(output.strip().splitlines()[-1], type=_PullResult)
    return read_base(Path(result.folder))


def read_base(folder: Path) -> PulledBase:
    """Return a base that the cache has.

    Raises:
        UpError: The folder holds none.
    """
    try:
        spec = msgspec.json.decode((folder / SPEC_FILE).read_bytes(), type=BaseSpec)
    except (OSError, *UNREADABLE) as error:
        raise UpError(f"{folder} holds no base ({error}). Fetch it with `loraplex base pull`.") from error
    return PulledBase(folder, spec)


def register_base(location: Location, base: PulledBase) -> Base:
    """Tell the registry the facts of a base and return how it knows it; the rank limit is then that of `base`.

    Raises:
        ClientError: The registry refused.
    """
    with Connection(location) as connection:
        answer = connection.send("POST", "/api/v1/bases", json=msgspec.to_builtins(base.spec))
    return decode(answer.content, Base)
