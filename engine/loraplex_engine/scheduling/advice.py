"""What to change when an engine is slow under load: names the shared lever, with figures. `Advisor` changes nothing.

It looks at the engine's counters about once a second, compares them with those of half a minute ago, and says each
kind of advice at most once a minute; `current` is what holds now.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

_LOOK_EVERY_S = 1.0
_WINDOW_S = 30.0
_SAY_EVERY_S = 60.0
_LONG_WAIT_S = 1.0
_FULL_RATIO, _ROOMY_RATIO = 0.9, 0.7
_MIN_STEPS, _FULL_STEPS_RATIO = 20, 0.5
_SLOWNESS, _OTHER_CORES = 1.5, 0.5
_RARE = 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's counters at one moment, and the flags that bound them."""

    num_waiting: int = 0
    num_running: int = 0
    oldest_wait_s: float = 0.0
    """Of the requests in the queue that wait for a seat or for blocks."""
    kv_usage_ratio: float = 0.0
    num_preemptions: int = 0
    num_steps: int = 0
    num_full_steps: int = 0
    """Steps with as many tokens as the flag allows."""
    num_overcommitted: int = 0
    """Adapters wanted of late beyond the slots."""
    oldest_slot_wait_s: float = 0.0
    slowness: float = 1.0
    """What steps take over what they took when the engine started."""
    other_cores: float = 0.0
    """Cores that other processes use."""
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    max_loras: int = 0
    cpu_threads: int = 0
    kv_cache_bytes: int = 0

    @property
    def is_queueing(self) -> bool:
        """Whether requests wait, and not only for the next step."""
        return self.num_waiting > 0 and self.oldest_wait_s >= _LONG_WAIT_S

    @property
    def waiting(self) -> str:
        """How many wait, as the beginning of a sentence."""
        return f"{_count(self.num_waiting, 'request')} {'waits' if self.num_waiting == 1 else 'wait'}"


class Advisor:
    """Watches one engine: `read` gives its counters and flags, all but those of steps, which it counts itself."""

    def __init__(
        self,
        read: Callable[[], EngineLoad],
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = _log.warning,
    ) -> None:
        self._read = read
        self._clock = clock
        self._warn = warn
        self._max_step_tokens = read().max_num_batched_tokens
        self._num_steps = 0
        self._num_full_steps = 0
        self._looks: deque[tuple[float, EngineLoad]] = deque()
        self._kind_to_text: dict[str, str] = {}
        self._kind_to_said_at: dict[str, float] = {}

    @property
    def current(self) -> list[str]:
        """The advice that the last look gave."""
        return list(self._kind_to_text.values())

    def look(self, num_step_tokens: int) -> None:
        """Count a step of so many tokens, 0 for none; once a second read the counters and warn of what they show."""
        self._num_steps += num_step_tokens > 0
        self._num_full_steps += num_step_tokens >= self._max_step_tokens
        now = self._clock()
        if self._looks and now - self._looks[-1][0] < _LOOK_EVERY_S:
            return
        load = replace(self._read(), num_steps=self._num_steps, num_full_steps=self._num_full_steps)
        self._looks.append((now, load))
        while now - self._looks[0][0] > _WINDOW_S:
            self._looks.popleft()
        self._kind_to_text = dict(advise(self._looks[0][1], load, now - self._looks[0][0]))
        for kind, text in self._kind_to_text.items():
            if now - self._kind_to_said_at.get(kind, -_SAY_EVERY_S) >= _SAY_EVERY_S:
                self._kind_to_said_at[kind] = now
                self._warn(text)


def advise(before: EngineLoad, now: EngineLoad, seconds: float) -> Iterator[tuple[str, str]]:
    """Kinds and texts of advice for an engine whose counters were `before` and, `seconds` later, are `now`."""
    for kind, find in (
        ("kv_cache", _find_lack_of_blocks),
        ("max_num_seqs", _find_lack_of_seats),
        ("max_loras", _find_lack_of_slots),
        ("max_num_batched_tokens", _find_full_steps),
        ("cores", _find_lack_of_cores),
    ):
        text = find(before, now, seconds)
        if text is not None:
            yield kind, text


def find_onset(running_to_preemptions: Mapping[int, int]) -> int | None:
    """With how many running requests preemptions begin: nine of ten happened with as many or more; None: none did."""
    left = sum(running_to_preemptions.values()) // _RARE
    for num_running, count in sorted(running_to_preemptions.items()):
        left -= count
        if left < 0:
            return num_running
    return None


def _find_lack_of_blocks(before: EngineLoad, now: EngineLoad, seconds: float) -> str | None:
    num_preempted = now.num_preemptions - before.num_preemptions
    if now.kv_usage_ratio < _FULL_RATIO or not (num_preempted or now.is_queueing):
        return None
    were = "was" if num_preempted == 1 else "were"
    return (
        f"{now.waiting}, the KV cache is {now.kv_usage_ratio:.0%} full and {_count(num_preempted, 'request')} {were} "
        f"preempted in the last {seconds:.0f} s: raise --kv-cache-memory-bytes (now "
        f"{now.kv_cache_bytes / 2**30:.1f} GiB) or lower --max-num-seqs (now {now.max_num_seqs}) or --max-model-len "
        f"(now {now.max_model_len})"
    )


def _find_lack_of_seats(_: EngineLoad, now: EngineLoad, __: float) -> str | None:
    if not now.is_queueing or now.num_running < now.max_num_seqs or now.kv_usage_ratio >= _ROOMY_RATIO:
        return None
    return (
        f"{now.waiting}, the longest for {now.oldest_wait_s:.1f} s, though the KV cache is only "
        f"{now.kv_usage_ratio:.0%} full: raise --max-num-seqs (now {now.max_num_seqs})"
    )


def _find_lack_of_slots(_: EngineLoad, now: EngineLoad, __: float) -> str | None:
    if now.num_overcommitted <= 0 or now.oldest_slot_wait_s < _LONG_WAIT_S:
        return None
    return (
        f"{now.max_loras + now.num_overcommitted} adapters take turns in {_count(now.max_loras, 'slot')} and the "
        f"longest wait is {now.oldest_slot_wait_s:.1f} s: raise --max-loras (now {now.max_loras})"
    )


def _find_full_steps(before: EngineLoad, now: EngineLoad, seconds: float) -> str | None:
    num_steps, num_full = now.num_steps - before.num_steps, now.num_full_steps - before.num_full_steps
    if not now.is_queueing or num_steps < _MIN_STEPS or num_full < _FULL_STEPS_RATIO * num_steps:
        return None
    return (
        f"{now.waiting} and {num_full} of {num_steps} steps in the last {seconds:.0f} s had all the tokens that they "
        f"may have: raise --max-num-batched-tokens (now {now.max_num_batched_tokens})"
    )


def _find_lack_of_cores(_: EngineLoad, now: EngineLoad, __: float) -> str | None:
    if now.slowness < _SLOWNESS or now.other_cores < _OTHER_CORES:
        return None
    return (
        f"steps take {now.slowness:.1f} times as long as when the engine started while other processes use "
        f"{now.other_cores:.1f} cores: stop them, or lower --cpu-threads (now {now.cpu_threads})"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
