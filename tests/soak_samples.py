"""What a platform holds, sampled: memory, files and threads of each process, and what engine and database hold.

A series is flat when the line fitted to it after the warm-up does not climb by more than a tolerance.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from platforms import command_of, list_children

ROLES = {
    "supervisor": "loraplex up",
    "gateway": "loraplex gateway",
    "engine front": "loraplex_engine serve",
    "engine core": "loraplex_engine core",
    "loader": "loraplex_engine.lora.worker",
    "sandbox": "server.sandbox.process",
    "upload checks": "uploads.check_process",
}
"""Each process by a part of its command; forks count with what they are of."""
WARM_UP = 0.35
"""The part of a run before which nothing is judged: caches fill, and allocators find their size."""
KEPT_MIB = 0.0007
"""What an engine keeps of a request that has ended, for 15 minutes: its cost, with names."""
_KIB = 1024


@dataclass(frozen=True)
class Tolerance:
    """How far the fitted line of a series may climb from the end of the warm-up to the end of the run."""

    unit: str
    absolute: float
    share: float = 0.0
    """Of the mean."""

    def allows(self, values: Sequence[float]) -> float:
        """The most that these may climb."""
        return max(self.absolute, self.share * statistics.fmean(values))


TOLERANCES = {
    "memory": Tolerance("MiB", 6.0, 0.06),
    "files": Tolerance("", 4.0),
    "threads": Tolerance("", 2.0),
    "held": Tolerance("", 3.0),
}


@dataclass(frozen=True)
class Series:
    """One quantity over time."""

    name: str
    kind: str
    values: tuple[float, ...]
    known: float = 0.0
    """Of a climb: what is kept for longer than the run, by design."""

    @property
    def judged(self) -> tuple[float, ...]:
        """What comes after the warm-up."""
        return self.values[int(len(self.values) * WARM_UP) :]

    @property
    def climb(self) -> float:
        """By how much the fitted line climbs over what is judged."""
        count = len(self.judged)
        return statistics.linear_regression(range(count), self.judged).slope * (count - 1) if count > 1 else 0.0

    @property
    def limit(self) -> float:
        """By how much it may."""
        return TOLERANCES[self.kind].allows(self.judged) + self.known


class Sampler:
    """Collects samples of the processes from `pid` down."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[dict[tuple[str, str], float]] = []

    def take(self, gauges: Mapping[str, float]) -> None:
        """Take one sample; `gauges` say what else is held."""
        sample: dict[tuple[str, str], float] = {}
        for pid in [self._pid, *list_children(self._pid)]:
            # helpers come and go
            with contextlib.suppress(OSError, StopIteration):
                role = next(role for role, word in ROLES.items() if word in command_of(pid))
                for kind, value in _measure(pid).items():
                    sample[role, kind] = sample.get((role, kind), 0.0) + value
        sample |= {(name, "held"): value for name, value in gauges.items()}
        self._samples.append(sample)

    def list_series(self, num_answers: int = 0) -> list[Series]:
        """All quantities, those of processes first; `num_answers` came while the samples were taken."""
        keys = list(dict.fromkeys(key for sample in self._samples for key in sample))
        known = {("engine front", "memory"): KEPT_MIB * num_answers * (1 - WARM_UP)}
        return [Series(*key, tuple(one.get(key, 0.0) for one in self._samples), known.get(key, 0.0)) for key in keys]


def _measure(pid: int) -> dict[str, float]:
    """Memory in MiB, open files, threads.

    Memory is what the process filled itself, by its share where forks have it too. Pages of files are left out: how
    many of a library's count depends on who else runs it.
    """
    folder = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    return {
        "memory": sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) / _KIB,
        "files": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
    }


def show(series: Sequence[Series]) -> str:
    """A table: where each stood after the warm-up and at the end, the most, the climb and what was allowed."""
    lines = ["| what | after warm-up | at the end | most | climb | allowed |", "|---|---|---|---|---|---|"]
    for one in series:
        unit = f" {TOLERANCES[one.kind].unit}".rstrip()
        name = one.name if one.kind == "held" else f"{one.name}, {one.kind}"
        numbers = (one.judged[0], one.judged[-1], max(one.values), one.climb, one.limit)
        lines.append(f"| {name} | " + " | ".join(f"{number:.1f}{unit}" for number in numbers) + " |")
    return "\n".join(lines)
