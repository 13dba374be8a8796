"""What an inventory of artifacts names, and what it finds wrong."""

from __future__ import annotations

from typing import Literal

import msgspec

FaultKind = Literal["missing", "truncated", "rotted", "extra", "digest", "database", "manifest", "foreign"]


class Fault(msgspec.Struct, frozen=True):
    """One thing that is not as it should be.

    `subject` is a digest, a digest with a place in its artifact, or a path; `kind` says how it is wrong: `missing`,
    `truncated`, `rotted` (other bytes), `extra` (nobody named it), `digest` (whole files of another adapter),
    `database`, `manifest`, `foreign` (a link or the like, which no backup has).
    """

    kind: FaultKind
    subject: str
    message: str


class NamedFile(msgspec.Struct, frozen=True):
    """A file of an artifact: its place in it (`files/NAME`, `extra/<sha256>`), its size in bytes, its sha256 in hex."""

    place: str
    size: int
    sha256: str


class NamedArtifact(msgspec.Struct, frozen=True):
    """An artifact that versions name: which ones (`tenant/adapter@number`), on which base, with which files."""

    digest: str
    fingerprint: str
    names: tuple[str, ...]
    files: tuple[NamedFile, ...]


class NamedBase(msgspec.Struct, frozen=True):
    """A base that a database knows."""

    name: str
    fingerprint: str
    weights_digest: str
