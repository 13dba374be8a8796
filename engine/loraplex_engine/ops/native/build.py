"""Builds and loads the native ops: one g++ call on first use, kept in the machine's cache.

`native_status` is the one answer to "which form serves the CPU, and why". A failure of any kind is an answer, not an
error: the torch form serves instead. Knows nothing of what the ops do.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = (
    "ops.cpp",
    "attention.h",
    "attention_tile.h",
    "dense.h",
    "layer.h",
    "linear.h",
    "linear_amx.h",
    "linear_tile.h",
    "lora.h",
    "sampling.h",
    "vector.h",
)
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
)
LIBRARY = "libloraplex_ops.so"
BUILD_TIMEOUT_S = 600
LOCK_TIMEOUT_S = 300


@dataclass(frozen=True)
class NativeStatus:
    """Which form of the ops serves the CPU."""

    form: str
    """`native` or `torch`."""
    reason: str
    """Why, in one sentence; for `torch` what to do about it."""


class NativeBuildError(Exception):
    """The native ops could not be built; install g++ or set LORAPLEX_NATIVE=0 to use the torch form knowingly."""

    code = "native_build_failed"


@functools.cache
def native_status() -> NativeStatus:
    """Build (if needed) and load the native ops, once per process.

    Returns:
        `native` when `torch.ops.loraplex` is ready to be called, else `torch` and the reason.
    """
    if os.environ.get("LORAPLEX_NATIVE", "1") == "0":
        return NativeStatus("torch", "switched off by LORAPLEX_NATIVE=0")
    try:
        library = _load(_cache_dir())
    except (NativeBuildError, OSError, RuntimeError) as error:
        return NativeStatus("torch", f"the native ops are not available: {error}")
    return NativeStatus("native", f"loaded {library}")


def _load(cache_dir: Path) -> Path:
    """Load the library, once more from the source where the kept file is damaged."""
    library = find_or_build_library(cache_dir)
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError:
        library.unlink(missing_ok=True)
        library = find_or_build_library(cache_dir)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return library


def find_or_build_library(cache_dir: Path) -> Path:
    """The library for this torch, this source and this CPU, built unless it is there.

    Args:
        cache_dir: the folder `native/<key>/` is looked for and made in.

    Raises:
        NativeBuildError: no compiler, or it failed.
        OSError: the cache cannot be written.
    """
    library = name_library(cache_dir)
    if library.exists():
        return library
    compiler = find_compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    with _build_lock(library.with_name("lock")):
        if not library.exists():
            _build(compiler, library)
    return library


def name_library(cache_dir: Path) -> Path:
    """The file of the library for this torch, this source and this CPU, whether it is built or not."""
    return cache_dir / "native" / _build_key() / LIBRARY


def _cache_dir() -> Path:
    """The machine's cache; a folder of this user's alone where that one cannot be written."""
    wanted = Path(os.environ.get("LORAPLEX_CACHE_DIR") or Path.home() / ".cache" / "loraplex")
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _private_cache_dir()
    return wanted if os.access(wanted, os.W_OK) else _private_cache_dir()


def _private_cache_dir() -> Path:
    folder = Path(tempfile.gettempdir()) / f"loraplex-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # NOTE: a library is code; a folder that somebody else made must not be trusted with it
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise NativeBuildError(f"{folder} belongs to somebody else; set LORAPLEX_CACHE_DIR")
    return folder


def find_compiler() -> str:
    """The C++ compiler of this machine.

    Raises:
        NativeBuildError: There is none.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise NativeBuildError("no g++ found; install it for the fast form (Debian: apt install g++)")
    return compiler


def _build_key() -> str:
    """Changes with everything that a kept library depends on."""
    parts = [torch.__version__, platform.machine(), _cpu_flags(), " ".join(FLAGS)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for name in SOURCES:
        digest.update(_source_dir().joinpath(name).read_bytes())
    return f"torch{torch.__version__}-{digest.hexdigest()[:16]}"


def _cpu_flags() -> str:
    """Model and feature flags, which `-march=native` goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _source_dir() -> Path:
    return Path(__file__).parent


@contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Hold the build to one process; the kernel frees the lock of a dead one, and nobody waits for ever."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        while not _try_lock(file.fileno()) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build(compiler: str, library: Path) -> None:
    """Compile beside the goal and rename, so that a library is whole or absent."""
    sys.stderr.write("loraplex: building the native CPU ops, once per machine (about 20 s)\n")
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    unfinished = Path(name)
    try:
        _compile(compiler, unfinished)
        unfinished.chmod(0o755)
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def _compile(compiler: str, output: Path) -> None:
    root = Path(torch.__file__).parent
    command = [
        compiler,
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-isystem",
        str(root / "include"),
        str(_source_dir() / "ops.cpp"),
        *_libraries(root / "lib"),
        "-o",
        str(output),
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{compiler}: {error}") from error
    if run.returncode != 0:
        raise NativeBuildError(f"{compiler} failed: {_first_error(run.stderr)}")


def _libraries(folder: Path) -> list[str]:
    """Link arguments; torch's own OpenMP run time comes first, since two thread pools would fight."""
    openmp = sorted(folder.glob("libgomp*.so*"))
    return [*(str(path) for path in openmp), f"-L{folder}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}"]


def _first_error(output: str) -> str:
    lines = output.strip().splitlines() or ["no output"]
    return next((line for line in lines if "error" in line), lines[-1])
