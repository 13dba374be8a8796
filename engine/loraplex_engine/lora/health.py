"""What this replica holds against adapters: loads that failed, and strikes for outputs that are not finite.

`AdapterHealth` is the only writer of both. It knows digests and errors, neither requests nor bytes. Only what lies in
an adapter's own bytes ever becomes final; a store that is away or a process that died is tried again for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loraplex_engine.errors import (
    AdapterQuarantinedError,
    DigestMismatchError,
    LoadFailedError,
    RequestError,
)
from loraplex_engine.lora.packed import LoadFailed

MAX_CONTENT_FAILURES = 5
"""Failures by the bytes' own fault after which a load is final."""
MAX_STRIKES = 3
"""Different prompts that must meet numbers that are not finite before the adapter is quarantined."""
_MAX_BACKOFF_S = 30.0
_MAX_KNOWN = 10_000


@dataclass(slots=True)
class Failure:
    """Failed loads of one digest in a row; the last of them says what to tell requests."""

    last: LoadFailed
    num_attempts: int
    num_content: int
    retry_at: float

    @property
    def is_final(self) -> bool:
        """Whether no further load is tried until somebody asks for the digest by name."""
        return self.num_content >= MAX_CONTENT_FAILURES

    def to_error(self) -> RequestError:
        """What a request for the digest is told."""
        if self.is_final:
            return AdapterQuarantinedError(
                f"This replica gave up loading the adapter after {self.num_attempts} tries: {self.last.message} "
                "Upload it again as a new version."
            )
        kind = DigestMismatchError if self.last.code == DigestMismatchError.code else LoadFailedError
        return kind(self.last.message)


@dataclass(slots=True)
class Strikes:
    """Prompts on which an adapter alone was to blame, and what was seen last."""

    reason: str = ""
    prompts: set[bytes] = field(default_factory=set)

    @property
    def is_quarantined(self) -> bool:
        """Whether the adapter is no longer served here."""
        return len(self.prompts) >= MAX_STRIKES


class AdapterHealth:
    """Failures and strikes by digest; both end when somebody drops the digest or asks for it by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, Failure] = {}
        self._strikes: dict[str, Strikes] = {}
        self.num_strikes = 0
        self.num_quarantines = 0

    def find_refusal(self, digest: str) -> RequestError | None:
        """Why the digest is neither loaded nor served at the moment, or None when it may be."""
        strikes = self._strikes.get(digest)
        if strikes is not None and strikes.is_quarantined:
            return AdapterQuarantinedError(f"This replica has quarantined the adapter: {strikes.reason}")
        failure = self._failures.get(digest)
        if failure is not None and (failure.is_final or self._clock() < failure.retry_at):
            return failure.to_error()
        return None

    def note_failure(self, failed: LoadFailed) -> None:
        """Count a failed load; the next may begin after a pause that doubles up to half a minute."""
        previous = self._failures.pop(failed.digest, None)
        num_attempts = previous.num_attempts + 1 if previous else 1
        num_content = (previous.num_content if previous else 0) + failed.is_content
        pause_s = min(_MAX_BACKOFF_S, 2.0 ** min(num_attempts - 1, 10))
        self._failures[failed.digest] = Failure(failed, num_attempts, num_content, self._clock() + pause_s)
        _forget_oldest(self._failures)

    def note_loaded(self, digest: str) -> None:
        """Forget the failed loads of a digest that has been loaded."""
        self._failures.pop(digest, None)

    def strike(self, digest: str, prompt_hash: bytes, reason: str) -> None:
        """Hold a prompt against an adapter; the same prompt counts once, however often it is sent."""
        strikes = self._strikes.setdefault(digest, Strikes())
        if prompt_hash in strikes.prompts or strikes.is_quarantined:
            return
        strikes.prompts.add(prompt_hash)
        strikes.reason = reason
        self.num_strikes += 1
        self.num_quarantines += strikes.is_quarantined
        _forget_oldest(self._strikes)

    def forgive(self, digest: str) -> None:
        """Forget everything that is held against a digest."""
        self._failures.pop(digest, None)
        self._strikes.pop(digest, None)

    @property
    def num_quarantined(self) -> int:
        """Adapters that are quarantined now."""
        return sum(strikes.is_quarantined for strikes in self._strikes.values())

    @property
    def num_failed(self) -> int:
        """Adapters whose last load failed."""
        return len(self._failures)

    def state(self) -> dict[str, Any]:
        """Failed and quarantined digests for `GET /internal/state`; `retry_in_s` is None where no retry comes."""
        now = self._clock()
        failed = {
            digest: {
                "reason": failure.last.message,
                "code": failure.last.code,
                "attempts": failure.num_attempts,
                "is_content": failure.last.is_content,
                "is_final": failure.is_final,
                "retry_in_s": None if failure.is_final else round(max(0.0, failure.retry_at - now), 3),
            }
            for digest, failure in self._failures.items()
        }
        quarantined = {
            digest: {"reason": strikes.reason, "strikes": len(strikes.prompts)}
            for digest, strikes in self._strikes.items()
            if strikes.is_quarantined
        }
        return {"failed": failed, "quarantined": quarantined}


def _forget_oldest(known: dict[str, Any]) -> None:
    """Bound what hostile callers can make us remember."""
    if len(known) > _MAX_KNOWN:
        del known[next(iter(known))]
