"""What happens to one adapter, numbers that overflow or a drop, ends its own requests at most and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import EngineWorld, text_ids
from loraplex_engine.bases.pull import pull
from loraplex_engine.errors import AdapterQuarantinedError
from support import write_adapter

PROMPT = [5, 9, 2, 7, 11, 3, 8, 4, 6, 1, 12, 10, 15, 13, 14, 16, 17, 19, 18, 20]


@pytest.fixture
def world(tiny_llama: Path, tmp_path: Path) -> EngineWorld:
    base = pull(str(tiny_llama), tmp_path / "bases")
    return EngineWorld(base, tmp_path / "cache", max_model_len=128)


def _put(world: EngineWorld, base: Path, folder: Path, std: float) -> str:
    return world.put(write_adapter(folder, base, std=std))


def test_neighbours_of_an_adapter_that_overflows_keep_their_tokens_and_it_is_quarantined(
    world: EngineWorld, tiny_llama: Path, tmp_path: Path
) -> None:
    good = _put(world, tiny_llama, tmp_path / "good", 0.2)
    bad = _put(world, tiny_llama, tmp_path / "bad", 1e30)
    rows = [(PROMPT, None), (PROMPT, good), (PROMPT[3:], good)]
    alone = [text_ids(next(iter(world.run([world.request(*row)]).values()))) for row in rows]
    for number in range(3):
        requests = [world.request(*row) for row in rows]
        # a prompt that is longer than a step's share, so that its first blocks are full before anybody knows
        doomed = world.request([30 + number, *PROMPT * 3], bad)
        events = world.run([*requests, doomed])
        assert [text_ids(events[request.request_id]) for request in requests] == alone
        (end,) = events[doomed.request_id]
        assert end.error is not None
        assert end.error.code == "adapter_output_invalid"
        _idle(world)
    assert set(world.engine.state()["quarantined"]) == {bad}
    with pytest.raises(AdapterQuarantinedError):
        world.engine.add(world.request(PROMPT, bad))
    # as if the bad one had held every block before
    world.engine.poison()
    assert [text_ids(next(iter(world.run([world.request(*row)]).values()))) for row in rows] == alone


def test_an_adapter_that_was_dropped_answers_the_one_step_that_waited_for_it_and_is_gone(
    world: EngineWorld, tiny_llama: Path, tmp_path: Path
) -> None:
    digest = _put(world, tiny_llama, tmp_path / "good", 0.2)
    request = world.request(PROMPT, digest, max_tokens=1)
    world.engine.add(request)
    world.engine.residency.drop(digest)
    (end,) = world.finish([request.request_id])[request.request_id]
    assert (end.finish, len(end.token_ids)) == ("length", 1)
    assert world.engine.residency.host_digests == ()


def _idle(world: EngineWorld) -> None:
    while world.engine.has_requests:
        assert world.engine.step() == []
    world.engine.check_integrity()
