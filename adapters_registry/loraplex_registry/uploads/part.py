"""Reads the headers of one part of a multipart body: a file's name as sent, with one meaning or none.

Whatever another reader could take for another name or for other bytes is refused; the names are judged elsewhere.
"""

from __future__ import annotations

import re

from multipart import MultipartSegment  # type: ignore[import-untyped]

from loraplex_registry.errors import InvalidRequestError, UnknownParameterError, UnsupportedMediaTypeError

_FIELD = "files"
_DISPOSITION = "Content-Disposition"
_PARAMETER = re.compile(r';\s*([A-Za-z0-9_*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))\s*')
# each header with the values that leave the bytes as they are
_PLAIN = {"Content-Encoding": ("identity",), "Content-Transfer-Encoding": ("binary", "8bit", "7bit")}


def read_filename(part: MultipartSegment) -> str:
    r"""Return the file's name as sent: one with a backslash keeps it, so that no unquoting can make it look plain.

    Raises:
        UnknownParameterError: The part is not called `files`.
        InvalidRequestError: A header or a parameter that matters is there twice, or cannot be read.
        UnsupportedMediaTypeError: The part is encoded.
    """
    if part.name != _FIELD:
        raise UnknownParameterError(f"Send each file as a part called {_FIELD!r}, not {part.name!r}", param=part.name)
    _check_plain(part)
    lines = [value for name, value in part.headerlist if name == _DISPOSITION]
    if len(lines) != 1:
        raise InvalidRequestError("A part has Content-Disposition twice; send it once", param=_DISPOSITION)
    return _read_parameters(lines[0]).get("filename", part.filename or "")


def _check_plain(part: MultipartSegment) -> None:
    for name, value in part.headerlist:
        if value.strip().lower() not in _PLAIN.get(name, (value.strip().lower(),)):
            raise UnsupportedMediaTypeError(f"Send each part without {name}: its bytes as they are")


def _read_parameters(line: str) -> dict[str, str]:
    found: dict[str, str] = {}
    position = max(line.find(";"), 0)
    while position < len(line):
        match = _PARAMETER.match(line, position)
        if match is None:
            raise InvalidRequestError("A part's Content-Disposition cannot be read", param=_DISPOSITION)
        name = match[1].lower()
        if name in found or name.endswith("*"):
            raise InvalidRequestError("A part needs one name and one filename, each plain", param=_DISPOSITION)
        found[name] = match[2] if match[2] is not None else match[3]
        position = match.end()
    return found
