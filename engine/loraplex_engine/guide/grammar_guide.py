"""`GrammarGuide` follows one request's output with an llguidance matcher; threads do its work, piece by piece.

At most one piece of a guide exists at a time: the step loop asks for the next one when it has seen the end of the last.
So a matcher is never used by two threads, and nothing here needs a lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple, Protocol

import llguidance
import numpy as np
from numpy.typing import NDArray

from loraplex_engine.core.guide import GuideState
from loraplex_engine.errors import GrammarError, RequestError, StepFailedError
from loraplex_engine.guide.rounds import Outcome, Row
from loraplex_engine.wire.messages import SamplingParams

Submit = Callable[[Callable[[], Outcome]], Future[Outcome]]
"""Lets a pool of threads do a piece of work."""

_log = logging.getLogger(__name__)

_MAX_PENDING_S = 10.0
"""The limits of a grammar end its work long before."""
_FREE_CPU_S, _CPU_S_PER_TOKEN = 0.5, 0.002
"""Processor time that a request's grammar may take: so much, and so much for each token. Most take a hundredth."""
_SLOW_S = 0.001
"""A row whose mask takes longer works alone from then on, until one is quicker."""

_PENDING = Outcome(GuideState.PENDING)


class Sizes(NamedTuple):
    """Tokens that there are."""

    tokenizer: int
    """As llguidance counts them: never fewer than the tokenizer has."""
    model: int


class Endings(NamedTuple):
    """Tokens that end an answer, and from where on the request lets them.

    The grammar has the last word: where it allows nothing else, they are allowed.
    """

    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    ignores_eos: bool

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> Endings:
        """The endings of one request."""
        return cls(eos_token_ids, params.stop_token_ids, params.min_tokens, params.ignore_eos)

    def find_unwanted(self, position: int) -> tuple[int, ...]:
        """Tokens that should not come at an output position."""
        if position < self.min_tokens:
            return (*self.eos_token_ids, *self.stop_token_ids)
        return self.eos_token_ids if self.ignores_eos else ()


class Threads(Protocol):
    """Where guides have their work done; `Rounds`, but for tests."""

    def join(self, row: Row, /) -> Future[Outcome]:
        """Let `row` work in the next round."""

    def submit_alone(self, work: Callable[[], Outcome], /) -> Future[Outcome]:
        """Let a thread do a piece of work of one row."""


class GrammarGuide:
    """`Guide` of one request."""

    def __init__(
        self,
        build: Callable[[], llguidance.LLMatcher],
        endings: Endings,
        sizes: Sizes,
        submit_build: Submit,
        threads: Threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare nothing yet.

        Args:
            build: Makes the matcher; takes long, raises GrammarError.
            endings: Of the request.
            sizes: Of the vocabulary.
            submit_build: Lets a thread do the first piece of work.
            threads: Do the others.
            clock: Monotonic seconds.
        """
        self._build_matcher = build
        self._endings = endings
        self._sizes = sizes
        self._submit_build = submit_build
        self._threads = threads
        self._clock = clock
        self._matcher: llguidance.LLMatcher | None = None
        self._words: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self._token_id = 0
        self._num_tokens = 0
        self._cpu_s = 0.0
        self._is_slow = False
        self._work: Future[Outcome] | None = None
        self._asked_at = 0.0

    @property
    def state(self) -> GuideState:
        """How far it is."""
        return self._outcome().state

    @property
    def error(self) -> RequestError | None:
        """Why it failed."""
        return self._outcome().error

    @property
    def allowed(self) -> NDArray[np.uint32]:
        """Words of bits, as many as the model's vocabulary needs."""
        return self._words[: count_words(self._sizes.model)]

    def begin(self) -> None:
        """Let a thread build the matcher and find the first mask."""
        if self._work is None:
            self._asked_at = self._clock()
            self._work = self._submit_build(lambda: self._guard(self._build))

    def advance(self, token_id: int) -> None:
        """Let a thread take in a token and find the next mask."""
        assert self.state is GuideState.READY
        self._token_id = token_id
        self._asked_at = self._clock()
        self._work = self._threads.submit_alone(self.follow) if self._is_slow else self._threads.join(self)

    def follow(self) -> Outcome:
        """Take in the token and find the next mask, timed."""
        return self._guard(self._follow)

    def wait(self, seconds: float) -> bool:
        """Wait for the thread."""
        if self._work is None:
            return False
        return self._work.done() or bool(wait((self._work,), timeout=seconds).done)

    def close(self) -> None:
        """Forget what no thread has begun."""
        if self._work is not None:
            self._work.cancel()

    def _outcome(self) -> Outcome:
        if self._work is None:
            return _PENDING
        if self._work.cancelled():
            return Outcome(GuideState.FAILED, GrammarError())
        if self._work.done():
            return self._work.result()
        if self._clock() - self._asked_at > _MAX_PENDING_S:
            return Outcome(GuideState.FAILED, GrammarError("The grammar takes too long to follow; make it simpler."))
        return _PENDING

    def _guard(self, work: Callable[[], Outcome]) -> Outcome:
        """Whatever goes wrong is an outcome: a thread has nobody to tell."""
        began_at = time.thread_time()
        try:
            outcome = work()
            took_s = time.thread_time() - began_at
            self._cpu_s += took_s
            if self._cpu_s > _FREE_CPU_S + _CPU_S_PER_TOKEN * self._num_tokens:
                raise GrammarError("The grammar takes too much time to follow; make it simpler.")
            self._is_slow = self._num_tokens > 0 and took_s > _SLOW_S
        except GrammarError as error:
            return Outcome(GuideState.FAILED, error)
        except Exception:  # noqa: BLE001 - the request ends with it, its neighbours go on
            return _fail()
        return outcome

    def _build(self) -> Outcome:
        self._matcher = self._build_matcher()
        check_matcher(self._matcher)
        return Outcome(GuideState.ENDED) if self._matcher.is_stopped() else self._look(self._matcher)

    def _follow(self) -> Outcome:
        matcher = self._matcher
        assert matcher is not None
        self._num_tokens += 1
        matcher.consume_token(self._token_id)
        check_matcher(matcher)
        return Outcome(GuideState.ENDED) if matcher.is_stopped() else self._look(matcher)

    def _look(self, matcher: llguidance.LLMatcher) -> Outcome:
        """Find what may come where the matcher stands."""
        self._words = np.zeros(count_words(self._sizes.tokenizer), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        check_matcher(matcher)
        if self._forbid_unwanted() and not self._words.any():
            raise GrammarError("The grammar wants a token that this model does not have.")
        return Outcome(GuideState.READY)

    def _forbid_unwanted(self) -> bool:
        """Take away tokens that the model lacks, and unwanted ones unless they alone are left; False if there are none.

        A mask of a matcher that goes on allows something.
        """
        words, (num_known, num_used) = self._words, self._sizes
        unwanted = self._endings.find_unwanted(self._num_tokens)
        if num_known <= num_used and not unwanted:
            return False
        if num_known > num_used:
            words[num_used // 32] &= np.uint32((1 << num_used % 32) - 1)
            words[num_used // 32 + 1 :] = 0
        bits = [(token_id // 32, np.uint32(1 << token_id % 32)) for token_id in unwanted if 0 <= token_id < num_used]
        taken = [(index, words[index] & bit) for index, bit in bits]
        for index, bit in bits:
            words[index] &= ~bit
        if taken and not words.any():
            for index, bit in taken:
                words[index] |= bit
        return True


def check_matcher(matcher: llguidance.LLMatcher) -> None:
    """Raise GrammarError should the matcher have given up."""
    if matcher.is_error():
        reason = matcher.get_error().partition("\n")[0].strip().rstrip(".")
        raise GrammarError(f"The grammar cannot be followed: {reason}.")


def _fail() -> Outcome:
    _log.exception("a grammar could not be followed")
    return Outcome(GuideState.FAILED, StepFailedError())


def count_words(num_tokens: int) -> int:
    """Return the words of a mask over so many tokens."""
    return (num_tokens + 31) // 32
