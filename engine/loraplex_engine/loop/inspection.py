"""What an engine would compute with on this machine: torch, GPUs and their driver, compiled ops. Builds nothing."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from loraplex_engine.config import available_cpus
from loraplex_engine.ops.native.build import NativeBuildError, find_compiler, name_library

_DEVICE = Path("/dev/nvidiactl")
_DRIVER = Path("/proc/driver/nvidia/version")
_GIB = 1 << 30


class Inspected(NamedTuple):
    """One thing that was looked at; `remedy` says what to do where it is not `ok`."""

    check: str
    verdict: Literal["ok", "warn", "fail"]
    message: str
    remedy: str = ""


def inspect_machine(cache_dir: Path, *, uses_native: bool) -> list[Inspected]:
    """Return what there is.

    Args:
        cache_dir: Where compiled ops are kept.
        uses_native: Whether LORAPLEX_NATIVE lets them be used.
    """
    cores = available_cpus()
    threads = f"{cores} core{'' if cores == 1 else 's'}"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, triton {_find_version('triton')}"
    return [
        Inspected("torch", "ok", f"{versions}; {threads} for this process."),
        *_inspect_gpus(),
        _inspect_ops(cache_dir, uses_native=uses_native),
    ]


def _inspect_gpus() -> Iterator[Inspected]:
    driver = _read_driver()
    if not _DEVICE.exists() and driver is None:
        yield Inspected("gpu", "ok", "No GPU: this engine computes on the CPU.")
        return
    shown = f"driver {driver or 'unknown'}"
    if torch.version.cuda is None:
        remedy = "Install torch's CUDA build for this driver."
        yield Inspected("gpu", "warn", f"There is a GPU ({shown}), but torch was built for the CPU alone.", remedy)
        return
    if not torch.cuda.is_available():
        why = f"torch, built for CUDA {torch.version.cuda}, cannot use the GPU ({shown})."
        yield Inspected("gpu", "fail", why, "Update the driver, and run nvidia-smi: it says what is wrong.")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        chip = f"sm_{facts.major}{facts.minor}"
        yield Inspected("gpu", "ok", f"{facts.name}, {facts.total_memory / _GIB:.0f} GiB, {chip}, {shown}.")


def _inspect_ops(cache_dir: Path, *, uses_native: bool) -> Inspected:
    lost = "the torch forms serve, several times slower per token, with the same answers"
    if not uses_native:
        return Inspected("ops", "warn", f"LORAPLEX_NATIVE=0: {lost}.", "Unset it.")
    library = name_library(cache_dir)
    if library.exists():
        return Inspected("ops", "ok", f"Compiled ops are built: {library}.")
    try:
        compiler = find_compiler()
    except NativeBuildError:
        return Inspected("ops", "warn", f"No compiled ops and no C++ compiler: {lost}.", "Debian: apt install g++")
    return Inspected("ops", "ok", f"Compiled ops are not built yet; the first start does so with {compiler}.")


def _read_driver() -> str | None:
    try:
        found = re.search(r"Module\D*(\d+[\d.]*)", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
