"""`loraplex base pull` and `base list`: hand over to the engine's own program, which knows formats and hubs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cyclopts import App

from loraplex.cli.output import AsJson

app = App(
    name="base",
    help="Fetch base models into this machine's cache, and list what it has.",
    help_format="plaintext",
    help_epilogue=(
        "Examples:\n\n  loraplex base pull smollm2-135m\n  loraplex base pull ./Qwen2.5-0.5B-Instruct\n"
        "  loraplex base pull HuggingFaceTB/SmolLM2-360M-Instruct\n  loraplex base list\n"
    ),
)


@app.command
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
    arguments = ["pull", spec]
    arguments += ["--to", str(to)] if to else []
    arguments += ["--served-model-name", served_model_name] if served_model_name else []
    _become_engine(*arguments, *(["--json"] if as_json else []))


@app.command(name="list")
def list_(*, as_json: AsJson = False) -> None:
    """List the bases of this machine's cache: name, longest context, folder, and where it came from."""
    _become_engine("list", *(["--json"] if as_json else []))


def _become_engine(*arguments: str) -> None:
    sys.stdout.flush()
    argv = [sys.executable, "-m", "loraplex_engine", *arguments]
    os.execv(sys.executable, argv)  # noqa: S606 - no shell is wanted
