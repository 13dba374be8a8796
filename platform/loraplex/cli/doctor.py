"""`loraplex doctor`: what is not as it must be, and what to do about it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from loraplex.cli.config import PartName
from loraplex.cli.output import AsJson, done, print_json, print_table, say

if TYPE_CHECKING:
    from loraplex.doctor.finding import Finding
    from loraplex.doctor.patient import RegistryDoor

_DEFAULT_TIMEOUT_S = 10.0


def doctor(
    *,
    part: PartName | None = None,
    data_dir: Path | None = None,
    timeout: Annotated[float, Parameter(validator=Number(gte=1, lte=600))] = _DEFAULT_TIMEOUT_S,
    as_json: AsJson = False,
) -> int:
    """Look at everything that Loraplex stands on, and say what to do where it is not as it must be.

    Settings, keys, database and migrations, object store, Redis, engines and bases, clocks, disks, limits, ports,
    proxies, GPU and compiled code. It needs no running platform, changes nothing, and takes away the one object that
    it writes to the store. The exit code is 0 without failures, else 1.

    Args:
        part: As which part to look: with that part's settings, from where it runs. Default the one that the
            environment is for; up, with its data folder, if nothing says otherwise; client if there is only a URL.
        data_dir: The data folder, as for up.
        timeout: How long each check may take, seconds; they run side by side.
        as_json: Print JSON for programs.
    """
    from loraplex.doctor.examination import admit, examine

    # findings say it all
    logging.disable(logging.CRITICAL)
    found = examine(admit(os.environ, open_door(), timeout, part, data_dir))
    if as_json:
        print_json(found)
    else:
        _print(found.part, found.findings)
    return 0 if found.is_healthy else 1


def open_door() -> RegistryDoor:
    """Return the registry's functions for doctor."""
    from loraplex.doctor.patient import RegistryDoor
    from loraplex_registry import app

    return RegistryDoor(
        probe_store=app.probe_store,
        check_store_url=app.check_store_url,
        load_settings=app.load_settings,
        current=app.current,
        head=app.head,
        knows_revision=app.knows_revision,
        serves=app.serves,
    )


def _print(part: str, findings: list[Finding]) -> None:
    rows = [(one.verdict, one.check, one.message, one.remedy) for one in findings]
    print_table(f"Examined as {part}", ("", "check", "found", "what to do"), rows, empty="")
    counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in ("fail", "warn", "skip")}
    if not counts["fail"]:
        done(f"Nothing fails; {counts['warn']} warnings, {counts['skip']} not looked at.")
    else:
        say(f"{counts['fail']} failures, {counts['warn']} warnings, {counts['skip']} not looked at.")
