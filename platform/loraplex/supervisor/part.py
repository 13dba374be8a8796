"""What the children of a one-machine platform are: their programs, their settings, where their secrets lie."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.supervisor.base import PulledBase
from loraplex.supervisor.child import ChildSpec
from loraplex.supervisor.data_folder import DataFolder
from loraplex.supervisor.environment import build_environment, give_default, give_default_file
from loraplex.supervisor.option import UpOptions


@dataclass(frozen=True)
class Addresses:
    """Where the parts listen."""

    host: str
    port: int
    engine_port: int

    @property
    def url(self) -> str:
        """The gateway as this machine reaches it."""
        return f"http://{self._reachable}:{self.port}"

    @property
    def engine_url(self) -> str:
        """The engine, on loopback always."""
        return f"http://127.0.0.1:{self.engine_port}"

    @property
    def listen(self) -> str:
        """The gateway's own address, HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def _reachable(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        return f"[{host}]" if ":" in host else host


def build_control_environment(environ: Mapping[str, str], folder: DataFolder) -> dict[str, str]:
    """Return the environment of the gateway and of the migration: where database and objects are."""
    env = build_environment(environ, "gateway")
    env["LORAPLEX_DATA_DIR"] = str(folder.path)
    give_default(env, "LORAPLEX_DATABASE_URL", folder.database_url)
    give_default(env, "LORAPLEX_OBJECT_STORE_URL", folder.object_store_url)
    give_default_file(env, "LORAPLEX_ENGINE_KEY", folder.engine_key)
    return env


def build_gateway(
    options: UpOptions, environ: Mapping[str, str], folder: DataFolder, base: PulledBase, addresses: Addresses
) -> ChildSpec:
    """Describe the gateway, which holds the registry too."""
    env = build_control_environment(environ, folder)
    env.pop("LORAPLEX_LISTEN_FILE", None)
    env["LORAPLEX_LISTEN"] = addresses.listen
    give_default(env, "LORAPLEX_LOG_FORMAT", "text")
    give_default(
        env, "LORAPLEX_POOLS", json.dumps({"default": {"base": base.spec.name, "engines": [addresses.engine_url]}})
    )
    argv = [sys.executable, "-m", "loraplex", "gateway"]
    if options.insecure_behind_proxy:
        argv.append("--insecure-behind-proxy")
    return ChildSpec("gateway", tuple(argv), env, folder.log("gateway"))


def build_engine(
    options: UpOptions, environ: Mapping[str, str], folder: DataFolder, base: PulledBase, addresses: Addresses
) -> ChildSpec:
    """Describe the engine."""
    env = build_environment(environ, "engine")
    for name in ("LORAPLEX_LISTEN", "LORAPLEX_LISTEN_FILE"):
        env.pop(name, None)
    give_default(env, "LORAPLEX_LOG_FORMAT", "text")
    env["LORAPLEX_CACHE_DIR"] = str(options.cache_dir)
    env["LORAPLEX_REGISTRY_URL"] = addresses.url
    give_default_file(env, "LORAPLEX_VERIFY_KEYS", folder.verify_keys)
    give_default_file(env, "LORAPLEX_ENGINE_KEY", folder.engine_key)
    listen = f"127.0.0.1:{addresses.engine_port}"
    argv = [sys.executable, "-m", "loraplex_engine", "serve", "--base", str(base.folder), "--listen", listen]
    return ChildSpec("engine", (*argv, *options.engine_flags), env, folder.log("engine"))
