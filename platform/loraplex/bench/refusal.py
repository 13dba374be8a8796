"""When figures are not to be believed: each reason is one sentence, and says what to do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loraplex.bench.figure import count_needed
from loraplex.bench.load import Load, Measured
from loraplex.bench.result import Repeat

MAX_CPU_SHARE = 0.85
_MAX_LAG_SHARE, _SMALL_LAG_S = 0.25, 0.01
MAX_ERROR_SHARE = 0.01
_LATE_SHARE, _FEW = 0.05, 2


def find_problems(repeats: Sequence[Repeat]) -> list[str]:
    """Return why the figures of these repeats are not to be believed, each reason once for a server."""
    found: dict[tuple[str, str], str] = {}
    for repeat in repeats:
        for kind, problem in _find_in(repeat).items():
            found.setdefault((repeat.server, kind), problem)
    return list(found.values())


def find_gaps_in_figures(repeats: Sequence[Repeat]) -> list[str]:
    """Return which percentiles cannot be told, and from how many requests on they could."""
    if not repeats:
        return []
    num = min(sum(one.num_ok for one in repeats if one.server == server) for server in {one.server for one in repeats})
    lacking = [percent for percent in (50, 95, 99) if num < count_needed(percent)]
    if not lacking:
        return []
    told = " and ".join(f"p{percent} needs {count_needed(percent)}" for percent in lacking)
    return [f"Too few requests, {num} in all repeats together: {told}; take more --requests or --repeats."]


def keeps_up(measured: Measured, load: Load) -> bool | None:
    """Say whether the server kept the offered rate; None of a closed load, or where all failed.

    Semantics: it did if nearly all answers (95 %, or all but two) are complete when, after the last arrival, as much
    time has gone by as nearly all requests of the first half needed. Where the queue grows, later ones need longer.
    """
    answered = sorted((one for one in measured.outcomes if not one.error), key=lambda one: one.planned_at)
    if not load.is_open or not answered:
        return None
    first_half = [one.request_s for one in answered[: max(1, len(answered) // 2)]]
    deadline = measured.began_at + measured.planned_s + float(np.percentile(first_half, 95))
    return sum(one.end_at > deadline for one in answered) <= max(_FEW, _LATE_SHARE * len(answered))


def _find_in(repeat: Repeat) -> dict[str, str]:
    if repeat.num_ok == 0:
        code, message = next(iter(repeat.error_messages.items()), ("", ""))
        return {"failed": f"Every request to {repeat.server} failed: {code}: {message}"}
    problems = {}
    if (failed := repeat.num_requests - repeat.num_ok) > MAX_ERROR_SHARE * repeat.num_requests:
        told = ", ".join(f"{count} x {code}" for code, count in repeat.errors.items())
        problems["failed"] = (
            f"{failed} of {repeat.num_requests} requests to {repeat.server} failed ({told}): the others' times are "
            "those of a lighter load."
        )
    if repeat.keeps_up is False:
        problems["rate"] = (
            f"{repeat.server} did not keep up with {repeat.offered_rate:.3g} requests/s ({repeat.requests_per_s:.3g}/s "
            "done): its queue grew as long as they came, so times tell how long the run was. Take a lower --rate."
        )
    if problem := find_client_problem(repeat):
        problems["client"] = problem
    return problems


def find_client_problem(repeat: Repeat) -> str | None:
    """Return what is wrong with the client, which is part of what it measures: its lag counts as the server's time."""
    client, first_s = repeat.client, float(np.median(repeat.samples["ttft"]))
    bound_s = max(_SMALL_LAG_S, _MAX_LAG_SHARE * first_s)
    problem = None
    if client.cpu_share > MAX_CPU_SHARE:
        problem = (
            f"The client is saturated: it used {client.cpu_share:.2f} of the one core that it can use. Take fewer "
            "requests/s, or share them between several clients."
        )
    elif client.lag_p99_s > bound_s:
        problem = (
            f"The client is saturated: its own loop was {client.lag_p99_s * 1e3:.0f} ms late (p99) where the first "
            f"token takes {first_s * 1e3:.0f} ms. Give it a core of its own, or another machine than the server's."
        )
    elif client.late_p99_s > bound_s:
        problem = (
            f"The rate was not kept: requests left up to {client.late_p99_s * 1e3:.0f} ms (p99) after their planned "
            "moment. Give the client a core of its own, or take a lower --rate."
        )
    return problem
