"""Asking before something is deleted, where somebody sits at the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from loraplex.cli.output import stderr
from loraplex.client.errors import ClientError

Yes = Annotated[bool, Parameter(name="--yes", negative=(), help="Do not ask first.")]


def confirm(question: str, *, is_sure: bool) -> None:
    """Return if the reader agrees, said so by `--yes`, or there is no terminal to ask at.

    Raises:
        ClientError: They do not.
    """
    if is_sure or not sys.stdin.isatty():
        return
    try:
        answer = stderr().input(Text(f"{question} [y/N] ")).strip().lower()
    except EOFError:
        answer = ""
    if answer not in ("y", "yes"):
        raise ClientError("Nothing was deleted.", code="not_confirmed")
