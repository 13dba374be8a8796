"""`pull`: from a SPEC to the folder of a complete, described base; safe against crashes and against other pulls."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from loraplex_engine.bases.fingerprint import build_spec, complete_spec
from loraplex_engine.bases.folder import (
    Origin,
    bases_dir,
    find_marker,
    is_complete,
    list_bases,
    load_marker,
    load_spec,
    locked,
    publish,
    write_marker,
    write_spec,
)
from loraplex_engine.bases.manifest import digest_model
from loraplex_engine.bases.progress import NoProgress, PullProgress
from loraplex_engine.bases.source import SMALL_FILES, Source, find_source
from loraplex_engine.errors import BaseUnavailableError
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.wire.naming import check_name, served_name


def pull(
    spec: str, cache_dir: Path, progress: PullProgress | None = None, *, to: Path | None = None, name: str = ""
) -> Path:
    """Make the base `spec` available on this machine; what is there already is kept.

    Args:
        spec: A Hugging Face folder, a hub id, a .gguf file, or a known name such as `smollm2-135m`.
        cache_dir: The machine-wide cache.
        progress: Hears about stages and bytes.
        to: Instead of the cache: the base's own folder if its last part is the base's name, else the folder around it.
        name: Served name; empty = made from `spec`.

    Returns:
        The folder of the base; its last part is the base's name.

    Raises:
        BaseUnavailableError: it cannot be had, or another base has its name.
        BaseUnsupportedError: it is not served; the message names what is not.
    """
    if is_complete(Path(spec)):
        return _completed(Path(spec).resolve())
    progress = progress or NoProgress()
    source = find_source(spec)
    name = check_name(name, "served-model-name") if name else served_name(source.spec)
    target = _target(name, bases_dir(cache_dir) if to is None else to)
    with locked(target, progress):
        if _is_current(target, source):
            return _completed(target)
        staging = target.with_name(f".{name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        origin, base, hashes = _fill(staging, source, name, progress)
        twin = _find_twin(staging, base, [target, *(list_bases(cache_dir) if to is None else ())])
        if twin is not None:
            progress.note(f"These weights are here already as {twin.name}.")
            _accept_names(twin, (name, *base.accepted_names))
            shutil.rmtree(staging)
            return twin
        _check_free(target, origin)
        progress.begin("Computing the digest of the files")
        publish(staging, target, origin, hashes, digest_model(staging))
    return target


def _target(name: str, place: Path) -> Path:
    return (place if place.name == name else place / name).absolute()


def _is_current(target: Path, source: Source) -> bool:
    """Whether the base in `target` came from `source` and neither has changed since."""
    marker = find_marker(target) if is_complete(target) else None
    if marker is None or marker.origin.spec != source.spec:
        return False
    try:
        load_spec(target)
    except BaseUnavailableError:
        return False
    origin = source.origin()
    return origin is None or origin == marker.origin


def _completed(folder: Path) -> Path:
    """The folder, its spec brought up to date where an older release wrote it and it may be written."""
    spec = load_spec(folder)
    completed = complete_spec(folder, spec)
    if completed != spec:
        with contextlib.suppress(OSError):
            write_spec(folder, completed)
    marker = load_marker(folder)
    if not marker.digest:
        with contextlib.suppress(OSError):
            write_marker(folder, msgspec.structs.replace(marker, digest=digest_model(folder)))
    return folder


def _fill(staging: Path, source: Source, name: str, progress: PullProgress) -> tuple[Origin, BaseSpec, dict[str, str]]:
    origin, known = source.fetch(staging, progress)
    progress.begin("Computing the fingerprint")
    base, hashes = build_spec(staging, name, _names(name, source.accepted_names), known)
    write_spec(staging, base)
    return origin, base, hashes


def _names(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """The candidates without repetitions, case folded, and without the base's own name."""
    kept = {name.casefold(): ""}
    for candidate in candidates:
        kept.setdefault(candidate.casefold(), candidate)
    return tuple(candidate for candidate in kept.values() if candidate)


def _find_twin(staging: Path, base: BaseSpec, folders: Iterable[Path]) -> Path | None:
    """A base with the same fingerprint, weights and small files, so that it answers alike under any name."""
    for folder in folders:
        other = _find_spec(folder)
        if (
            other is not None
            and (other.fingerprint, other.weights_digest) == (base.fingerprint, base.weights_digest)
            and _read_small(folder) == _read_small(staging)
        ):
            return folder
    return None


def _read_small(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in SMALL_FILES if (folder / name).exists()}


def _find_spec(folder: Path) -> BaseSpec | None:
    try:
        return load_spec(folder)
    except BaseUnavailableError:
        return None


def _accept_names(folder: Path, names: Iterable[str]) -> None:
    spec = load_spec(folder)
    write_spec(folder, msgspec.structs.replace(spec, accepted_names=_names(spec.name, (*spec.accepted_names, *names))))


def _check_free(target: Path, origin: Origin) -> None:
    """Refuse to replace a base that came from somewhere else."""
    # one that rotted is replaced by whoever has its name
    if (marker := find_marker(target)) is not None and (there := marker.origin).spec != origin.spec:
        raise BaseUnavailableError(
            f"The name {target.name} is taken by the base from {there.spec}; give another with --served-model-name, or "
            f"delete {target}."
        )
