"""Uploads against the store's own put rate: `python tests/bench/bench_uploads.py [--quick]`; `make bench_uploads`.

A gateway process with the registry in it takes adapters of 1 MB and 100 MB, no two alike, from 1, 4 and 8 clients; in
turn with it the store alone takes as many of the same size from as many threads. Then versions are looked up while four
clients upload. `--backend s3` has Postgres and a real S3 server in place of SQLite and a folder.
"""

from __future__ import annotations

import http.client
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
from report import Report, build_parser, follow, parse_options

from crash_world import ADMIN_KEY, CrashWorld
from databases import running_postgres
from large_adapter import MODULES, LargeAdapter, describe_base
from loraplex.cli.app import main as loraplex
from loraplex_registry.storage.store import Store, create_store
from loraplex_registry.wire.adapter import Manifest, ManifestFile
from s3_world import running_s3

_TENANT, _BASE = "team-bench", "bench"
_BOUNDARY = "a-boundary-that-no-adapter-holds"
_NUM_LOOKUPS, _NUM_QUICK_LOOKUPS = 1000, 50
_MIN_RATIO, _MAX_P99_MS = 0.8, 50.0
_MAX_GROWTH_MIB = 64.0
_serial = count(1)
"""Of artifacts that are put without being judged."""


@dataclass(frozen=True)
class Size:
    """A kind of adapter: its name, rank, modules, how many are uploaded and from how many clients."""

    name: str
    rank: int
    modules: tuple[str, ...]
    num_uploads: int
    clients: tuple[int, ...]


_SIZES = (Size("1 MB", 4, MODULES[:1], 48, (1, 4, 8)), Size("100 MB", 96, MODULES, 4, (1, 4)))


class Client:
    """Uploads over one connection, at the least cost that a client can have."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)

    def upload(self, adapter: LargeAdapter, name: str) -> int:
        """Upload one and return its number."""
        begin = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename='
        head = f'{begin}"adapter_config.json"\r\n\r\n'.encode() + adapter.config
        head += f'\r\n{begin}"adapter_model.safetensors"\r\n\r\n'.encode()
        tail = f"\r\n--{_BOUNDARY}--\r\n".encode()

        def body() -> Iterator[bytes | memoryview]:
            yield head
            yield from adapter.cut()
            yield tail

        headers = {
            "content-type": f"multipart/form-data; boundary={_BOUNDARY}",
            "content-length": str(len(head) + adapter.num_bytes + len(tail)),
        }
        path = f"/api/v1/tenants/{_TENANT}/adapters/{name}/versions?promote=never"
        number: int = self.call("POST", path, body(), headers)["version"]
        return number

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """Call a route and return what it answers."""
        self._connection.request(method, path, body, {"authorization": f"Bearer {ADMIN_KEY}"} | (headers or {}))
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status < 300, (answer.status, content[:500])
        return msgspec.json.decode(content)


def time_all(num_calls: int, num_threads: int, build: Callable[[int], Callable[[], object]]) -> float:
    """Calls per second, made by so many threads, each with a call of its own from `build`."""
    left = iter(range(num_calls))
    lock = threading.Lock()
    faults: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                call()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(build(i),)) for i in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return num_calls / (time.perf_counter() - start)


def time_raw(store: Store, adapter: LargeAdapter, folder: Path, num_calls: int, num_threads: int) -> float:
    """Puts per second of the store alone; the files lie ready."""
    folder.mkdir()
    ready = []
    for i in range(num_calls):
        path = folder / str(i)
        with path.open("wb") as file:
            file.writelines(adapter.cut())
        ready.append(path)
    config = folder / "config"
    config.write_bytes(adapter.config)
    waiting = iter(ready)
    lock = threading.Lock()

    def put() -> None:
        with lock:
            path = next(waiting)
        digest = f"sha256:{next(_serial):064x}"
        files = {"adapter_config.json": config, "adapter_model.safetensors": path}
        facts = tuple(ManifestFile(name, file.stat().st_size, _hash(file)) for name, file in files.items())
        store.put(Manifest(digest=digest, base_fingerprint="f", files=facts, config={}), files)

    try:
        return time_all(num_calls, num_threads, lambda _: put)
    finally:
        for digest, _ in list(store.list_artifacts()):
            if digest.startswith("sha256:" + "0" * 40):
                store.delete(digest)
        store.sweep_staging(-1)
        shutil.rmtree(folder)


def _hash(path: Path) -> str:
    """A put names the sha256 of each file; what it costs to find belongs to storing it."""
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_memory_mib(pid: int) -> float:
    """Resident memory of a process and its children, MiB, without what they share."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            total += int(line.split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return total / 1024 + sum(read_memory_mib(int(child)) for child in children)


@contextmanager
def watching_memory(pid: int) -> Iterator[list[float]]:
    """Sample the memory of a process; the list grows."""
    samples = [read_memory_mib(pid)]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            try:
                samples.append(read_memory_mib(pid))
            except OSError:
                continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


@contextmanager
def serving(folder: Path, backend: str) -> Iterator[tuple[CrashWorld, Store]]:
    """A gateway with the base and the tenant known, and its store."""
    with ExitStack() as stack:
        if backend == "s3":
            server = stack.enter_context(running_s3())
            store_url, environ = server.url(), server.environ
            os.environ.update(environ)
            postgres = stack.enter_context(running_postgres())
            name = postgres.create()
            stack.callback(postgres.drop, name)
            database_url = postgres.url(name)
        else:
            store_url, environ = f"file://{folder}/objects", {}
            database_url = f"sqlite+aiosqlite:///{folder}/bench.db"
        assert loraplex(["db", "upgrade", "--url", database_url]) == 0
        world = CrashWorld(folder, database_url, store_url, environ, seed=0)
        stack.callback(world.stop)
        world.start()
        with world.client() as client:
            client.connection.send("POST", "/api/v1/bases", json=describe_base(_BASE))
            client.create_tenant(_TENANT)
        yield world, create_store(store_url, folder / "scratch")


def measure_size(world: CrashWorld, store: Store, size: Size, report: Report, num_rounds: int) -> None:
    """Uploads and puts of one size, in turn."""
    adapter = LargeAdapter(_BASE, size.rank, size.modules)
    Client(world.url).upload(adapter, "warm-up")
    rows = []
    for num_clients in size.clients:
        raw, whole = [], []
        num_calls = max(size.num_uploads, num_clients)
        with watching_memory(world.pid) as samples:
            for i in follow(range(num_rounds), f"{size.name}, {num_clients} clients"):
                raw.append(time_raw(store, adapter, world.folder / f"raw-{i}", num_calls, num_clients))
                whole.append(time_all(num_calls, num_clients, lambda n: _uploads(world.url, adapter, f"a-{n}")))
        ratio = statistics.median(whole) / statistics.median(raw)
        row = (num_clients, statistics.median(raw), statistics.median(whole), ratio, samples[0], max(samples))
        rows.append(row)
        report.check(f"{size.name}, {num_clients} clients: uploads / puts", ratio, at_least=_MIN_RATIO)
        report.check(f"{size.name}, {num_clients} clients: growth, MiB", row[5] - row[4], at_most=_MAX_GROWTH_MIB)
    report.table((size.name, "puts/s", "uploads/s", "ratio", "MiB before", "MiB at most"), rows)


def _uploads(url: str, adapter: LargeAdapter, name: str) -> Callable[[], object]:
    client = Client(url)
    return lambda: client.upload(adapter, name)


def measure_lookup(world: CrashWorld, report: Report, num_lookups: int) -> None:
    """Time of `GET …/versions/{n}` alone and while four clients upload 1 MB after 1 MB."""
    adapter = LargeAdapter(_BASE, _SIZES[0].rank, _SIZES[0].modules)
    number = Client(world.url).upload(adapter, "looked-up")
    path = f"/api/v1/tenants/{_TENANT}/adapters/looked-up/versions/{number}"
    is_over = threading.Event()

    def load(call: Callable[[], object]) -> None:
        while not is_over.is_set():
            call()

    rows = []
    for num_clients in (0, 4):
        threads = [
            threading.Thread(target=load, args=(_uploads(world.url, adapter, f"load-{i}"),)) for i in range(num_clients)
        ]
        for thread in threads:
            thread.start()
        reader, times_ms = Client(world.url), []
        for _ in range(num_lookups):
            start = time.perf_counter()
            reader.call("GET", path)
            times_ms.append(1000 * (time.perf_counter() - start))
        is_over.set()
        for thread in threads:
            thread.join()
        is_over.clear()
        quantiles = statistics.quantiles(times_ms, n=100)
        rows.append((num_clients, quantiles[49], quantiles[98], max(times_ms)))
    report.table(("uploading clients", "lookup p50 ms", "p99 ms", "longest ms"), rows)
    report.check("lookup p99 beside 4 uploading clients, ms", rows[1][2], at_most=_MAX_P99_MS)


def main() -> int:
    """Run it."""
    parser = build_parser(__doc__)
    parser.add_argument("--backend", default="folder", choices=["folder", "s3"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parse_options(parser)
    report = Report("uploads", options)
    sizes = (Size("1 MB", 4, MODULES[:1], 3, (1, 2)),) if options.quick else _SIZES
    with (
        tempfile.TemporaryDirectory(prefix="lpx-uploads-") as name,
        serving(Path(name), options.backend) as (world, store),
    ):
        for size in sizes:
            measure_size(world, store, size, report, 1 if options.quick else options.rounds)
        measure_lookup(world, report, _NUM_QUICK_LOOKUPS if options.quick else _NUM_LOOKUPS)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
