"""Settings, as `loraplex config check` judges them."""

from __future__ import annotations

from collections.abc import Iterator

from loraplex.client.location import find_empty
from loraplex.config.judge import judge
from loraplex.doctor.finding import Finding
from loraplex.doctor.keys import find_empty_file
from loraplex.doctor.patient import Patient


def check_settings(patient: Patient) -> Iterator[Finding]:
    """Look at every setting of the part."""
    resolved = patient.resolved
    for one in resolved.unknown:
        if not one.is_fatal:
            near = f" Did you mean {one.nearest}?" if one.nearest else ""
            remedy = f"Unset it, or correct its name.{near}"
            yield Finding("settings.names", "warn", f"{one.name} is not a setting and is ignored.", remedy)
    if resolved.part != "client":
        # commands on this machine refuse it, the part itself does not read it
        for name, message in find_empty(patient.environ).items():
            yield Finding("settings.empty", "warn", f"{message}.", f"Set or unset {name}.", name)
    problems = judge(resolved, patient.environ, patient.door.load_settings, patient.door.check_store_url)
    # `keys` says of these what to do
    told = [problem for problem in problems if not find_empty_file(patient, problem.setting)]
    for problem in told:
        yield Finding("settings.values", "fail", problem.message, f"Correct {problem.setting}.", problem.setting)
    if not problems:
        count = sum(found.source not in ("default", "none") for found in resolved.settings.values())
        yield Finding("settings.values", "ok", f"The settings of {resolved.part} are valid ({count} given).")
