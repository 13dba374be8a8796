"""What scheduler and sampler know of a grammar: the guide of one request says which tokens may come next."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from loraplex_engine.errors import RequestError


class GuideState(Enum):
    """How far a guide is with the tokens that it was told."""

    PENDING = "pending"
    READY = "ready"
    """`allowed` is about the next token."""
    ENDED = "ended"
    """The text is whole and nothing may follow."""
    FAILED = "failed"
    """`error` says why; it stays so."""


class Guide(Protocol):
    """Follows one request's output. No method but `wait` takes time: the work is done elsewhere while the model runs.

    begin -> PENDING -> READY | ENDED | FAILED; READY -advance-> PENDING.
    """

    @property
    def state(self) -> GuideState:
        """How far it is; may change at any time while PENDING."""

    @property
    def allowed(self) -> NDArray[np.uint32]:
        """Bit t % 32 of word t // 32 is set where token t may come next; when READY, valid until `advance`."""

    @property
    def error(self) -> RequestError | None:
        """Why it FAILED."""

    def begin(self) -> None:
        """Start to prepare for the first token; does nothing the second time."""

    def advance(self, token_id: int) -> None:
        """Take in the next token of the output, when READY."""

    def wait(self, seconds: float) -> bool:
        """Wait until it is no longer PENDING; False if it still is."""

    def close(self) -> None:
        """The request is over; what is left of the work is dropped."""
