"""A moment of each fuzz target: seeds, what was found before, and mutations of both. `make fuzz` goes on and on."""

from __future__ import annotations

import random
import time
import zlib

import pytest

from fuzz_target import CORPUS, MAX_CPU_S, SlowError, Target, mutate
from fuzz_targets import TARGETS

NUM_TRIES = 30
"""As many on each machine, and always the same ones: what is found anew is found by `make fuzz`."""
ACCEPTING = {name for name, target in TARGETS.items() if name not in ("api_key", "engine_token", "client_answer")}
"""Targets of which each seed is accepted; where there is no key nobody gets in."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_keeps_its_promise_for_a_moment(name: str) -> None:
    target, draw = TARGETS[name], random.Random(zlib.crc32(name.encode()))
    known = target.list_known()
    for data in known:
        target.try_once(data)
    for _ in range(NUM_TRIES):
        data = mutate(known, target.words, draw)
        try:
            target.try_once(data)
        except BaseException as error:
            error.add_note(f"{name}: {data!r}")
            raise


@pytest.mark.parametrize("name", sorted(ACCEPTING))
def test_a_target_begins_with_what_is_accepted(name: str) -> None:
    target = TARGETS[name]
    num_accepted = 0
    for seed in target.seeds:
        try:
            target.take(seed)
            num_accepted += 1
        except target.refusals:
            pass
    assert num_accepted > 0, "a search that begins with refusals finds little"


def test_what_was_found_belongs_to_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= TARGETS.keys()


def test_what_breaks_a_promise_is_found() -> None:
    def count(data: bytes) -> None:
        assert data.count(b"a") < 5

    def hang(_: bytes) -> None:
        end_at = time.process_time() + 0.02
        while time.process_time() < end_at:
            pass

    def search(target: Target) -> None:
        draw = random.Random(0)
        for _ in range(10_000):
            target.try_once(mutate(target.seeds, (b"aa",), draw))

    with pytest.raises(AssertionError):
        search(Target("count", count, (b"aaa", b"b")))
    with pytest.raises(SlowError):
        Target("hang", hang, (), max_cpu_s=0.01).try_once(b"")
    assert MAX_CPU_S > 0.01
