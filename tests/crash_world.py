"""A gateway process that is killed while many things are asked of it, and the ledger of what it has acknowledged.

Requests of a round end with the process; a large upload outlives it, as the client goes on where it was cut. What was
asked and not answered may have happened or not, but only as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError, ConnectionFailedError
from loraplex.client.large_upload import LargeUpload, send_in_parts
from loraplex.client.location import Location
from loraplex.client.management import LIVE, Management
from loraplex.client.upload import list_files
from loraplex.client.upload_memory import UploadMemory
from loraplex_registry.wire.adapter import Target, VersionView
from support import free_port, linear_shapes, tiny_llama_config, write_adapter, write_base

TENANT, BASE, ADMIN_KEY = "team-crash", "tiny", "the-admin-key-of-the-crashes"
ADAPTERS = ("one", "two")
_PROGRAM = "import os, sys; from loraplex.app import run; from loraplex.settings import load_settings; "
_PROGRAM += "sys.exit(run(load_settings(os.environ)))"
_PAUSE_S = 0.02


@dataclass
class Ledger:
    """What was answered, and what was asked without an answer. `faults` are answers that nobody should get."""

    versions: dict[tuple[str, int], str] = field(default_factory=dict)
    states: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    moves: dict[tuple[str, int], tuple[Target, ...]] = field(default_factory=dict)
    contents: set[str] = field(default_factory=set)
    num_cut: int = 0
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_version(self, version: VersionView) -> None:
        """Note an acknowledged version."""
        with self.lock:
            key = (version.adapter, version.version)
            known = self.versions.setdefault(key, version.digest)
            if known != version.digest:
                self.faults.append(f"{key} is {version.digest}, and was {known}")
            self.states.setdefault(key, {"ready"})

    def add_move(self, adapter: str, revision: int, targets: list[Target]) -> None:
        """Note an acknowledged change of `live`."""
        with self.lock:
            known = self.moves.setdefault((adapter, revision), tuple(targets))
            if known != tuple(targets):
                self.faults.append(f"revision {revision} of {adapter} is {targets}, and was {known}")


class Silent:
    """Watches an upload for nobody."""

    def hashing(self, total: int) -> None:
        """Nothing."""

    def sending(self, upload: str, total: int, received: int) -> None:
        """Nothing."""

    def judging(self) -> None:
        """Nothing."""

    def advance(self, count: int) -> None:
        """Nothing."""


class CrashWorld:
    """One database and store, and gateway processes over them, one after the other, on one port."""

    def __init__(self, folder: Path, database_url: str, store_url: str, environ: dict[str, str], seed: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self.ledger = Ledger()
        self.random = random.Random(seed)
        self._serial = 0
        self._serial_lock = threading.Lock()
        self._environ = {
            **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            "LORAPLEX_DATA_DIR": str(folder / "data"),
            "LORAPLEX_LISTEN": self.url.removeprefix("http://"),
            "LORAPLEX_DATABASE_URL": database_url,
            "LORAPLEX_OBJECT_STORE_URL": store_url,
            "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
            "LORAPLEX_PARITY_GATE": "off",
            **environ,
        }
        self._process: subprocess.Popen[bytes] | None = None
        write_base(folder / BASE, tiny_llama_config())

    def start(self) -> None:
        """Start a gateway and wait until it is ready."""
        with (self.folder / "gateway.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM], env=self._environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + 60
        with self.client() as client:
            while True:
                try:
                    client.connection.send("GET", "/readyz")
                except ClientError:
                    assert self._process.poll() is None, self.log
                    assert time.monotonic() < deadline, self.log
                    time.sleep(_PAUSE_S)
                else:
                    return

    def kill(self) -> None:
        """`kill -9`."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> None:
        """End the gateway as an operator does, if it runs."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()

    @property
    def pid(self) -> int:
        """Of the gateway that runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What all gateways have logged."""
        return (self.folder / "gateway.log").read_text(errors="replace")

    @contextlib.contextmanager
    def client(self) -> Iterator[Management]:
        """The client, as an administrator."""
        with Connection(Location(self.url, ADMIN_KEY)) as connection:
            yield Management(connection)

    def prepare(self) -> None:
        """Make the base, the tenant and a first version of each adapter."""
        config = tiny_llama_config()
        body = {
            "name": BASE,
            "fingerprint": "sha256:" + "f" * 64,
            "modules": {path: list(shape) for path, shape in linear_shapes(config).items()},
            "vocab_size": config["vocab_size"],
        }
        with self.client() as client:
            client.connection.send("POST", "/api/v1/bases", json=body)
            client.create_tenant(TENANT)
            for adapter in ADAPTERS:
                self.push(client, adapter, "auto")

    def write_adapter(self) -> Path:
        """Write an adapter that no other equals, and note it as asked for."""
        with self._serial_lock:
            self._serial += 1
            serial = self._serial
        folder: Path = write_adapter(self.folder / f"adapter-{serial}", self.folder / BASE, rank=2, seed=serial)
        digest = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
        with self.ledger.lock:
            self.ledger.contents.add(digest)
        return folder

    def push(self, client: Management, adapter: str, promote: str) -> None:
        """Upload a new adapter in one request."""
        version = client.push(TENANT, adapter, list_files(self.write_adapter()), lambda _: None, promote=promote)
        self.ledger.add_version(version)

    def run_round(self, length_s: float) -> None:
        """Ask for many things at once, kill the gateway after `length_s`, and return when all have seen it."""
        works: list[Callable[[Management, random.Random], None]] = [self._push, self._push, self._move, self._retire]
        threads = [
            threading.Thread(target=self._repeat, args=(work, random.Random(self.random.random())), daemon=True)
            for work in works
        ]
        for thread in threads:
            thread.start()
        time.sleep(length_s)
        self.kill()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"

    def _repeat(self, work: Callable[[Management, random.Random], None], chance: random.Random) -> None:
        with self.client() as client:
            while True:
                try:
                    work(client, chance)
                except ConnectionFailedError:
                    with self.ledger.lock:
                        self.ledger.num_cut += 1
                    return
                except ClientError as error:
                    if error.status not in (409, 412):
                        self._blame(work.__name__, error)
                        return
                except BaseException as error:
                    self._blame(work.__name__, error)
                    raise

    def _blame(self, what: str, error: BaseException) -> None:
        with self.ledger.lock:
            self.ledger.faults.append(f"{what}: {error!r} {getattr(error, 'status', '')}")

    def _push(self, client: Management, chance: random.Random) -> None:
        self.push(client, chance.choice(ADAPTERS), chance.choice(["auto", "always", "never"]))

    def _move(self, client: Management, chance: random.Random) -> None:
        adapter = chance.choice(ADAPTERS)
        if chance.random() < 0.4:
            alias = client.roll_back(TENANT, adapter)
        else:
            numbers = self._pick(adapter, chance, 2)
            shares = [100] if len(numbers) == 1 else [30, 70]
            targets = [Target(number, share) for number, share in zip(sorted(numbers), shares, strict=True)]
            alias = client.set_alias(TENANT, adapter, LIVE, targets).alias
        self.ledger.add_move(adapter, alias.revision, alias.targets)

    def _retire(self, client: Management, chance: random.Random) -> None:
        """Retire or restore one version; only this does so, so its state is known but for the last request."""
        adapter = chance.choice(ADAPTERS)
        (number,) = self._pick(adapter, chance, 1)
        states = self.ledger.states[adapter, number]
        to = "ready" if "retired" in states else "retired"
        before = set(states)
        states.add(to)
        try:
            if to == "retired":
                client.retire(TENANT, adapter, number)
            else:
                client.restore(TENANT, adapter, number)
        except ConnectionFailedError:
            raise
        except ClientError:
            states.intersection_update(before)
            raise
        states.intersection_update({to})

    def _pick(self, adapter: str, chance: random.Random, most: int) -> list[int]:
        with self.ledger.lock:
            known = [number for name, number in self.ledger.versions if name == adapter]
        return chance.sample(known, min(len(known), chance.randint(1, most)))


class LargePusher:
    """Pushes one adapter after another in parts, across the gateways' deaths, until it is told to stop."""

    def __init__(self, world: CrashWorld) -> None:
        self._world = world
        self._is_over, self._is_left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_versions = 0
        self.num_cut = 0

    def __enter__(self) -> LargePusher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._is_left.set()

    def finish(self, limit_s: float) -> bool:
        """Wait for the one that is on its way, and say whether it has arrived.

        One whose gateway died while it completed is taken over after a minute.
        """
        self._is_over.set()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._push(self._world.write_adapter())
            except BaseException as error:
                # one that the test no longer waits for meets what comes after it
                if not self._is_left.is_set():
                    self._world._blame("a large upload", error)
                return

    def _push(self, folder: Path) -> None:
        adapter = ADAPTERS[self.num_versions % len(ADAPTERS)]
        order = LargeUpload(TENANT, adapter, list_files(folder), {"promote": "never"})
        memory = UploadMemory(self._world.folder / "cache")
        while True:
            try:
                with self._world.client() as client:
                    upload = send_in_parts(client.connection, order, memory, Silent())
            except ConnectionFailedError:
                self.num_cut += 1
                continue
            self._world.ledger.add_version(upload.version)
            self.num_versions += 1
            return


def find_gaps(numbers: list[int]) -> list[int]:
    """What is absent of 1 to the highest number."""
    return sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
