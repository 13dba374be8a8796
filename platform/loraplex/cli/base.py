"""`loraplex base pull` and `base list` hand over to the engine's own program, which knows formats and hubs.

`base register` tells the platform of a base that this machine has, where no `loraplex up` does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from cyclopts import App

from loraplex.cli.example import examples
from loraplex.cli.output import AsJson, done, print_json

app = App(
    name="base",
    help="Fetch base models into this machine's cache, list what it has, and make them known to a platform.",
    help_format="plaintext",
    help_epilogue=examples(
        "loraplex base pull smollm2-135m", "loraplex base list", "loraplex base register smollm2-135m"
    ),
)


@app.command(
    help_epilogue=examples(
        "loraplex base pull smollm2-135m",
        "loraplex base pull HuggingFaceTB/SmolLM2-360M-Instruct",
        "loraplex base pull ./Qwen2.5-0.5B-Instruct --served-model-name qwen",
    )
)
def pull(
    spec: str, /, *, to: Path | None = None, served_model_name: str | None = None, as_json: AsJson = False
) -> None:
    """Fetch a base: resumed if cut, checked by digest, nothing to do if it is there.

    Args:
        spec: A folder, a hub id, a .gguf file, or the name smollm2-135m.
        to: Keep it in this folder instead of in the cache.
        served_model_name: Name it this.
        as_json: End with one line of JSON.
    """
    from loraplex.supervisor.engine_program import FOR_FETCHING, check_engine_installed

    check_engine_installed(FOR_FETCHING)
    arguments = ["pull", spec]
    arguments += ["--to", str(to)] if to else []
    arguments += ["--served-model-name", served_model_name] if served_model_name else []
    _become_engine(*arguments, *(["--json"] if as_json else []))


@app.command(name="list", help_epilogue=examples("loraplex base list"))
def list_(*, as_json: AsJson = False) -> None:
    """List the bases of this machine's cache: name, longest context, folder, and where it came from."""
    _become_engine("list", *(["--json"] if as_json else []))


@app.command(
    help_epilogue=examples(
        "LORAPLEX_URL=http://gateway:8080 LORAPLEX_API_KEY=... loraplex base register smollm2-135m",
        "loraplex base register ./Qwen2.5-0.5B-Instruct --max-lora-rank 128",
    )
)
def register(
    spec: str,
    /,
    *,
    served_model_name: str | None = None,
    max_lora_rank: int | None = None,
    as_json: AsJson = False,
) -> None:
    """Make a base known to the platform, by an admin key: where gateway and engines run apart, before its first engine.

    Run it on a machine that has the base, as an engine's; it is fetched if it is absent. Registered again, a base that
    the platform knows only learns what is new. `loraplex up` needs no such step.

    Args:
        spec: A folder, a hub id, a .gguf file, or a name, as for `base pull`.
        served_model_name: Name it this.
        max_lora_rank: Highest rank that uploads may have, as the engines' --max-lora-rank. Default what is registered,
            else 64.
        as_json: Print JSON for programs.
    """
    from loraplex.client.connection import Connection
    from loraplex.client.location import find_location
    from loraplex.client.management import Management
    from loraplex.supervisor.base import pull_base, register_base

    location = find_location(os.environ)
    location.require_key()
    base = asyncio.run(pull_base(spec, served_model_name or "", dict(os.environ)))
    if max_lora_rank is None:
        with Connection(location) as connection:
            bases = Management(connection).list_bases()
        known = [one for one in bases if one.fingerprint == base.spec.fingerprint]
        max_lora_rank = known[0].max_lora_rank if known else base.spec.max_lora_rank
    found = register_base(location, base.limit_rank(max_lora_rank))
    if as_json:
        print_json(found)
        return
    other = "" if found.name == base.spec.name else f" (here it is {base.spec.name})"
    done(f"{found.name}{other} is known at {location.url}, with adapters up to rank {found.max_lora_rank}.")


def _become_engine(*arguments: str) -> None:
    sys.stdout.flush()
    argv = [sys.executable, "-m", "loraplex_engine", *arguments]
    os.execv(sys.executable, argv)  # noqa: S606 - no shell is wanted
