"""The engine's flags, judged by the engine's own program before anything is changed or started."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec

from loraplex.supervisor.errors import UpError

_PREFIX = "loraplex engine: "
_CHECK_S = 60


class EngineLimits(msgspec.Struct):
    """What an engine with these flags limits that the registry must know."""

    max_lora_rank: int


async def check_engine_flags(flags: Sequence[str], env: dict[str, str]) -> EngineLimits:
    """Return the limits of an engine with these flags and this environment.

    Raises:
        UpError: It would not start; the engine's sentence says why.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplex_engine", "check", *flags),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_CHECK_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UpError(f"The engine did not judge its flags within {_CHECK_S} s; try again.") from None
    if process.returncode != 0:
        raise UpError(find_sentence(errors.decode(errors="replace").strip()))
    return msgspec.json.decode(output, type=EngineLimits)


def find_sentence(errors: str) -> str:
    """Return what the engine says of itself; warnings of its settings may stand before it."""
    said = [line.removeprefix(_PREFIX) for line in errors.splitlines() if line.startswith(_PREFIX)]
    return "\n".join(said) or errors
