from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from loraplex_engine.errors import GrammarError
from loraplex_engine.guide.fair_thread import FairThread
from loraplex_engine.guide.guides import Guides
from loraplex_engine.wire.messages import SamplingParams


def test_tenants_take_turns_and_each_has_its_own_order() -> None:
    thread, go, done = FairThread("t"), threading.Event(), list[str]()
    first = thread.submit("a", lambda: go.wait(5))
    futures = [thread.submit(name[0], lambda name=name: done.append(name)) for name in ("a1", "a2", "a3", "b1", "c1")]
    go.set()
    for future in (first, *futures):
        future.result(5)
    assert done == ["a1", "b1", "c1", "a2", "a3"]


def test_what_was_cancelled_is_not_done_and_what_fails_is_told() -> None:
    thread, go, done = FairThread("t"), threading.Event(), list[str]()
    thread.submit("a", lambda: go.wait(5))
    cancelled = thread.submit("a", lambda: done.append("cancelled"))
    failed = thread.submit("a", lambda: 1 // 0)
    assert cancelled.cancel()
    go.set()
    with pytest.raises(ZeroDivisionError):
        failed.result(5)
    assert thread.submit("b", lambda: 7).result(5) == 7
    assert done == []


def test_guides_of_many_requests_of_a_tenant_let_another_tenant_in() -> None:
    guides = Guides(None, 8, ())
    guides._vocabulary = SimpleNamespace(vocab_size=8)  # type: ignore[assignment]
    go, built = threading.Event(), list[str]()

    def build(_: object, grammar: str) -> None:
        go.wait(5)
        built.append(grammar)
        raise GrammarError

    guides._build = build  # type: ignore[method-assign,assignment]
    names = ("a0", "a1", "a2", "b0")
    opened = [guides.open(SamplingParams(4, grammar=name), name[0]) for name in names]
    for guide in opened:
        guide.begin()
    go.set()
    assert all(guide.wait(5) for guide in opened)
    assert built.index("b0") < built.index("a2")
