"""Whether a config was trained on the base at hand, by name.

A name is compared and never opened as a path. The rule: case-folded, the config's value equals the base's name, one of
its accepted names or the last part of one; a local path counts by its last part.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from loraplex_registry.peft.findings import Findings, listed, show
from loraplex_registry.peft.spec import BaseSpec

_FIELD = "base_model_name_or_path"
_LOCAL_PATH = re.compile(r"[/\\~.]|[A-Za-z]:[/\\]|[^/\\]*\\|[^/]*/[^/]*/")


def matches_base(name: str, base: BaseSpec) -> bool:
    """Whether `name`, as PEFT wrote it into a config, means this base.

    A hub id (`org/model`) counts as a whole: a model of the same name by someone else is another model.
    """
    accepted = {accepted.casefold() for accepted in (base.name, *base.accepted_names)}
    accepted |= {_last_part(accepted) for accepted in accepted}
    return bool(name) and (_last_part(name) if is_local_path(name) else name).casefold() in accepted


def is_local_path(name: str) -> bool:
    """Whether a name can only be a path: it starts like one, has a backslash or more than one slash."""
    return _LOCAL_PATH.match(name) is not None


def _last_part(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]


def judge_base_name(
    name: str | None,
    base: BaseSpec,
    findings: Findings,
    *,
    forced: bool,
    find_stranger: Callable[[], str | None] = lambda: None,
) -> None:
    """Add the check `base_mismatch`; with `forced`, a mismatch is a warning that stays in the report.

    Args:
        name: What the config calls its base.
        base: The base.
        findings: Where it is added.
        forced: An administrator named the base.
        find_stranger: Says why the weights can be no adapter of the base, None if they may be one: who only has a path
            of his own in his config is told another thing than who has another model.
    """
    if name is not None and matches_base(name, base):
        findings.settle("base_mismatch")
        return
    said = f"{_FIELD} is {show(name)}" if name else f"{_FIELD} is missing"
    if forced:
        findings.warn("base_mismatch", f"{said}; an administrator forced the base {base.name}.", _FIELD)
        return
    said = f"{said}, not a name of this base ({listed([base.name, *base.accepted_names])})"
    stranger = find_stranger()
    if stranger is None:
        findings.fail("base_mismatch", f'{said}; set it to "{base.name}".', _FIELD)
    else:
        message = (
            f"{said}, and the weights are of another model: {stranger}; train on {base.name}, or have that model served"
        )
        findings.fail("base_mismatch", f"{message}.", _FIELD)
