"""What `loraplex up` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_BASE = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """One platform on one machine."""

    data_dir: Path
    """Database, objects, logs and keys."""
    cache_dir: Path
    """Machine-wide cache of bases and built code."""
    base: str = DEFAULT_BASE
    """What `loraplex base pull` takes: folder, hub id, .gguf file or name."""
    served_model_name: str = ""
    """Name of the base in the API; empty takes the one of its last part."""
    host: str = "127.0.0.1"
    port: int = 8080
    """Where the gateway listens; port 0 takes a free one."""
    insecure_behind_proxy: bool = False
    """Listen beyond this machine without TLS, because a proxy in front has it."""
    engine_flags: tuple[str, ...] = ()
    """Flags for the engine as it takes them."""
    drain_s: float = 30.0
    """Seconds that running answers get at the end."""
