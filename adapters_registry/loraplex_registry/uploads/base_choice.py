"""Which base an upload is judged against. Names are compared, never opened."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from loraplex_registry.adapters.view import build_spec
from loraplex_registry.db.model import BaseRow
from loraplex_registry.errors import AdapterRejectedError, ConflictError, NotFoundError
from loraplex_registry.peft.base_rule import matches_base
from loraplex_registry.peft.file_rule import CONFIG_FILE
from loraplex_registry.peft.report import Check, build_report
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.uploads.order import StagedFile, UploadOrder
from loraplex_registry.uploads.publish import Seen
from loraplex_registry.wire.adapter import Report


def build_refusal(report: Report) -> AdapterRejectedError:
    """Return the error that refuses an upload with its report."""
    failure = report.first_failure
    assert failure is not None, "a report without a failing check has a plan"
    return AdapterRejectedError(report, failure.message, param=failure.subject or None)


class _NamedBase(msgspec.Struct):
    """The one field of a config that chooses the base."""

    base_model_name_or_path: str | None = None


def find_forced(order: UploadOrder, seen: Seen) -> BaseRow | None:
    """Return the base that an admin named, None if none was.

    Raises:
        ConflictError: The adapter belongs to another.
        NotFoundError: It does not exist.
    """
    if order.base is None:
        return None
    named = _find_named(order.base, seen.bases)
    if seen.adapter is not None and named.id != seen.adapter.base_id:
        raise ConflictError(f"The adapter belongs to the base {seen.adapter.base.name}", param="base")
    return named


async def choose_base(order: UploadOrder, seen: Seen, files: Mapping[str, StagedFile]) -> BaseRow:
    """Return the base that the files are judged against: the adapter's, the one an admin named, or by the config.

    Raises:
        AdapterRejectedError: The config's name fits no base, or several.
        ConflictError: There is no base at all, or the adapter belongs to another than the one named.
        NotFoundError: The one named does not exist.
    """
    bases = seen.bases
    if not bases:
        raise ConflictError("There is no base model yet; an admin registers one by `loraplex base register`")
    named = find_forced(order, seen)
    if seen.adapter is not None:
        return next(base for base in bases if base.id == seen.adapter.base_id)
    return named or _choose_by_config(await asyncio.to_thread(_read_base_name, files[CONFIG_FILE].path), bases)


def _find_named(name: str, bases: Sequence[BaseRow]) -> BaseRow:
    for base in bases:
        if name == base.name or name in base.accepted_names:
            return base
    raise NotFoundError(f"There is no base {name}", param="base")


def _read_base_name(path: Path) -> str | None:
    """Return what the config calls its base; None where that cannot be read, which the checks will say."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_NamedBase).base_model_name_or_path
    except UNREADABLE:
        return None


def _choose_by_config(name: str | None, bases: Sequence[BaseRow]) -> BaseRow:
    if name is None or len(bases) == 1:
        return bases[0]
    matching = [base for base in bases if matches_base(name, build_spec(base))]
    if len(matching) == 1:
        return matching[0]
    accepted = "; ".join(", ".join([base.name, *base.accepted_names]) for base in matching or bases)
    fault = "is a name of several bases" if matching else "is no name of a base"
    message = (
        f"base_model_name_or_path {fault} ({accepted}); set it to the one that the adapter was trained on; if that is "
        "none of them, have its model served, or train on one of these."
    )
    check = Check("base_mismatch", "fail", message, "base_model_name_or_path")
    raise build_refusal(build_report([check]))
