"""Chooses from all combinations of parameters so many that every two values meet: the marker `pairs`.

What a combination of three breaks that no two do is left to `make endure`, which runs them all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence

import pytest

Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def choose(combinations: Sequence[dict[str, Hashable]]) -> list[int]:
    """Return the places of combinations that have between them every two values that meet in any."""
    if len(combinations[0]) < 3:
        return list(range(len(combinations)))
    pairs = [set[Pair](itertools.combinations(sorted(one.items()), 2)) for one in combinations]
    missing, chosen = set[Pair]().union(*pairs), list[int]()
    while missing:
        # of combinations that are as good the first, so that all processes choose the same
        best = max(range(len(pairs)), key=lambda place: len(pairs[place] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def _describe(parameters: Mapping[str, object]) -> dict[str, Hashable]:
    """A parameter with parts of its own is as many parameters."""
    found: dict[str, Hashable] = {}
    for name, value in parameters.items():
        if dataclasses.is_dataclass(value):
            found |= {f"{name}.{part.name}": repr(getattr(value, part.name)) for part in dataclasses.fields(value)}
        else:
            found[name] = repr(value)
    return found


def thin_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what tests marked `pairs` need not run."""
    groups: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("pairs"):
            groups.setdefault((item.nodeid.partition("::")[0], item.originalname), []).append(item)
    left_out: set[pytest.Item] = set()
    for found in groups.values():
        kept = set(choose([_describe(item.callspec.params) for item in found]))
        left_out.update(item for place, item in enumerate(found) if place not in kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
