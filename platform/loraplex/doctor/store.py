"""The object store, tried by the registry's own probe, and its clock."""

from __future__ import annotations

from collections.abc import Iterator

from loraplex.doctor.finding import Finding, judge_clock
from loraplex.doctor.patient import Patient

_SKEW_WARN_S, _SKEW_FAIL_S = 5.0, 300.0


def check_store(patient: Patient) -> Iterator[Finding]:
    """Try what Loraplex does with the store."""
    url = patient.value("LORAPLEX_OBJECT_STORE_URL")
    if url is None:
        yield Finding("store.writes", "skip", f"Nothing says where the object store of {patient.part} is.")
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
