"""Requests whose answers must match a grammar. `Guided` is the only one that tells their guides how far they are.

A guide works while the model runs. One that is not done when the model is makes its row late: the row gets no token in
that step, keeps what it had computed but its last position, and stands aside until its guide is done. So a slow grammar
costs its own request time, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator

from loraplex_engine.core.guide import GuideState
from loraplex_engine.core.request import Request
from loraplex_engine.errors import RequestError


class Guided:
    """The requests of an engine that have a guide and have begun to run, preempted ones too."""

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}
        self._late: set[Request] = set()

    @property
    def num_late(self) -> int:
        """Requests that stand aside."""
        return len(self._late)

    def begin(self, request: Request) -> None:
        """A request starts to run, perhaps again."""
        if request.guide is not None:
            self._requests[request] = None
            request.guide.begin()

    def advance(self, request: Request) -> None:
        """A request has got its next token and will want another."""
        if request.guide is not None:
            request.guide.advance(request.output_ids[-1])

    def note_late(self, request: Request) -> None:
        """A request got no token, since its guide was not done."""
        self._late.add(request)

    def resume(self, request: Request) -> None:
        """A request stands aside no longer: its guide is done, or it will start over."""
        self._late.discard(request)

    def is_late(self, request: Request) -> bool:
        """Whether a request stands aside."""
        return request in self._late

    def forget(self, request: Request) -> None:
        """A request is over."""
        if request.guide is not None:
            request.guide.close()
            self._requests.pop(request, None)
            self._late.discard(request)

    def settle(self) -> Iterator[tuple[Request, RequestError | None]]:
        """Let late requests whose guides are done go on.

        Yields:
            Requests that are over: their text is whole, or their guide failed by an error.
        """
        for request in list(self._requests):
            guide = request.guide
            assert guide is not None
            state = guide.state
            if state is not GuideState.PENDING:
                self.resume(request)
            if state in (GuideState.ENDED, GuideState.FAILED):
                yield request, guide.error

    def check_integrity(self, requests: set[Request]) -> None:
        """Assert that it knows requests of the engine alone."""
        assert set(self._requests) <= requests
        assert self._late <= set(self._requests)
