"""Matches regular expressions from adapter configs against module names in bounded time.

Patterns without repetition run here; all others run in a helper process that the kernel ends after a limit of processor
time, since Python's matcher cannot be interrupted. The limit counts the helper's own time, so a busy machine never
refuses what an idle one accepts.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from loraplex_registry.peft import pattern_process
from loraplex_registry.peft.confined import run_confined
from loraplex_registry.peft.errors import PatternError

MAX_PATTERN_LENGTH = 512
MAX_PATTERNS = 4096
CPU_LIMIT_S = 0.1
TOTAL_CPU_LIMIT_S = 1.0
_WALL_LIMIT_S = 30.0

# no repetition, group, class or flag: the matcher can only walk forward
_PLAIN = re.compile(r"(?:[A-Za-z0-9_^$.\-]|\\[.\-_])*")


class Pattern(msgspec.Struct, frozen=True):
    """A user's `source` and the expression `text` that PEFT builds around it.

    `is_full` asks for `re.fullmatch` instead of `re.match`.
    """

    source: str
    text: str
    is_full: bool = False


Matches = dict[str, str]
"""Matched names, each with what the group `idx` captured (empty without such a group)."""


def match_patterns(patterns: Sequence[Pattern], names: Sequence[str]) -> list[Matches]:
    """Match each pattern against each name.

    Args:
        patterns: at most `MAX_PATTERNS`, each source at most `MAX_PATTERN_LENGTH` characters.
        names: module paths of a base.

    Returns:
        One `Matches` for each pattern, in order.

    Raises:
        PatternError: a pattern is invalid, too long or took more than `CPU_LIMIT_S` of processor time, or all of them
            took more than `TOTAL_CPU_LIMIT_S`.
        OSError: no helper process can be started.
    """
    for pattern in patterns:
        if len(pattern.source) > MAX_PATTERN_LENGTH:
            raise PatternError(pattern.source, f"it is longer than {MAX_PATTERN_LENGTH} characters")
    if len(patterns) > MAX_PATTERNS:
        raise PatternError(patterns[MAX_PATTERNS].source, f"there are more than {MAX_PATTERNS} patterns")
    hard = [pattern for pattern in patterns if not is_plain(pattern.source)]
    found = iter(_match_in_helper(hard, names) if hard else [])
    return [_match_here(pattern, names) if is_plain(pattern.source) else next(found) for pattern in patterns]


def is_plain(source: str) -> bool:
    """Whether a pattern cannot backtrack: letters, dots and anchors only."""
    return _PLAIN.fullmatch(source) is not None


def _match_here(pattern: Pattern, names: Sequence[str]) -> Matches:
    compiled = re.compile(pattern.text)
    match = compiled.fullmatch if pattern.is_full else compiled.match
    return {name: found.groupdict().get("idx") or "" for name in names if (found := match(name))}


def _match_in_helper(patterns: Sequence[Pattern], names: Sequence[str]) -> list[Matches]:
    job = {
        "patterns": [[pattern.text, pattern.is_full] for pattern in patterns],
        "names": list(names),
        "limits_s": [CPU_LIMIT_S, TOTAL_CPU_LIMIT_S],
    }
    answers, fault = _run_helper(json.dumps(job).encode())
    for pattern, answer in zip(patterns, answers, strict=False):
        if "error" in answer:
            raise PatternError(pattern.source, answer["error"])
    if len(answers) < len(patterns):
        raise PatternError(patterns[len(answers)].source, fault)
    return [answer["matches"] for answer in answers]


def _run_helper(job: bytes) -> tuple[list[dict[str, Any]], str]:
    """The helper's answers, one for each pattern or fewer if it was ended, and why it was."""
    # -I and -S: the script sees the standard library only, wherever it lies
    command = [sys.executable, "-I", "-S", "-W", "ignore", pattern_process.__file__]
    outcome = run_confined(pattern_process.run, command, job, _WALL_LIMIT_S)
    if outcome.is_late:
        return [], f"it took more than {_WALL_LIMIT_S:g} s"
    answers = [json.loads(line) for line in outcome.answer.split(b"\n")[:-1]]
    is_slow = outcome.code == -signal.SIGVTALRM
    return answers, f"it took more than {CPU_LIMIT_S} s of processor time" if is_slow else "it could not be evaluated"
