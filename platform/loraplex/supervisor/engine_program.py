"""Whether this Python has what the engine's own program imports; a wheel without its extra has the program alone."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from loraplex.supervisor.errors import UpError

INSTALL_ENGINE = "Install the engine: pip install 'loraplex[engine]'"
FOR_FETCHING = ("safetensors", "tokenizers")
FOR_SERVING = (*FOR_FETCHING, "llguidance", "torch", "zmq")


def check_engine_installed(packages: Sequence[str]) -> None:
    """Return if all `packages` can be imported; none is.

    Raises:
        UpError: One is absent.
    """
    absent = [name for name in packages if find_spec(name) is None]
    if absent:
        raise UpError(f"This Python has no {', '.join(absent)}, which the engine needs. {INSTALL_ENGINE}.")
