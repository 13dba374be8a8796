"""The object store, tried by the registry's own probe, and its clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from loraplex.doctor.finding import Finding, judge_clock
from loraplex.doctor.machine import find_place
from loraplex.doctor.patient import Patient

_SKEW_WARN_S, _SKEW_FAIL_S = 5.0, 300.0


def check_store(patient: Patient) -> Iterator[Finding]:
    """Try what Loraplex does with the store."""
    url = patient.value("LORAPLEX_OBJECT_STORE_URL")
    if url is None:
        yield Finding("store.writes", "skip", f"Nothing says where the object store of {patient.part} is.")
        return
    if url.startswith("file:") and not find_place(Path(unquote(urlsplit(url).path))).is_dir():
        yield Finding("store.writes", "skip", "A file stands where its folder is to be: `machine.disk` says which.")
        return
    for step in patient.door.probe_store(url, patient.value("LORAPLEX_OBJECT_STORE_PUBLIC_URL")):
        if step.clock is None:
            if step.message:
                yield Finding(f"store.{step.name}", step.verdict, step.message, step.remedy)
            continue
        yield judge_clock(
            "store.clock",
            step.clock.timestamp() - step.asked_at,
            whose="The store's clock",
            warn_s=_SKEW_WARN_S,
            fail_s=_SKEW_FAIL_S,
            why="S3 refuses requests of a clock that is 15 minutes off, and presigned URLs end early or late",
        )
