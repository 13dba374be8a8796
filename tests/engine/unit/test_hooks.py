"""The test hooks of a core: what they do, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import SEVEN, EngineWorld, text_ids
from loraplex_engine.bases.pull import pull
from loraplex_engine.loop.hooks import TOLERATED, Hooks
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.wire.messages import BindFolder, KillRequest, PoisonFree
from support import write_adapter

PROMPT = list(range(3, 40))


class Hooked:
    """An engine with hooks, and an adapter folder; two slots."""

    def __init__(self, base: Path, tmp: Path) -> None:
        self.tmp = tmp
        self.world = EngineWorld(pull(str(base), tmp / "bases"), tmp / "cache", cpu_threads=1, max_loras=2)
        disk = AdapterDisk(self.world.loader.root, self.world.loader.spec, None, TOLERATED)
        self.world.loader._disk = disk
        self.hooks = Hooks(self.world.engine, disk)
        self.folder = write_adapter(tmp / "good", base, targets=SEVEN)

    def bind(self, folder: Path) -> str:
        reply = self.hooks.answer(BindFolder(1, str(folder)))
        assert isinstance(reply.body, dict), reply.error
        return str(reply.body["digest"])

    def generate(self, digest: str | None, max_tokens: int = 8) -> list[int]:
        request = self.world.request(PROMPT, digest, max_tokens)
        return text_ids(self.world.run([request])[request.request_id])


@pytest.fixture
def hooked(tiny_llama: Path, tmp_path: Path) -> Hooked:
    return Hooked(tiny_llama, tmp_path)


def test_a_bound_folder_has_the_digest_and_the_answers_of_an_upload(hooked: Hooked) -> None:
    digest = hooked.bind(hooked.folder)
    assert digest == hooked.world.put(hooked.folder)
    assert hooked.generate(digest) != hooked.generate(None)
    assert hooked.bind(hooked.folder) == digest


def test_values_that_no_upload_may_have_are_bound_and_end_their_own_request(hooked: Hooked, tiny_llama: Path) -> None:
    bad = hooked.bind(write_adapter(hooked.tmp / "nan", tiny_llama, std=float("nan")))
    request = hooked.world.request(PROMPT, bad, 8)
    last = hooked.world.run([request])[request.request_id][-1]
    assert last.error is not None
    assert last.error.code == "adapter_output_invalid"


@pytest.mark.parametrize(("rank", "targets"), [(65, ["q_proj"]), (8, ["no_proj"])])
def test_what_has_no_room_or_no_place_is_not_bound(
    hooked: Hooked, tiny_llama: Path, rank: int, targets: list[str]
) -> None:
    folder = write_adapter(hooked.tmp / "bad", tiny_llama, rank=rank, targets=targets)
    reply = hooked.hooks.answer(BindFolder(1, str(folder)))
    assert reply.error is not None
    assert (reply.error.code, list(hooked.world.loader.root.iterdir())) == ("digest_mismatch", [])


@pytest.mark.parametrize("path", ["", "relative", "/no/such/folder", "/dev/null", "/\0", "/etc"])
def test_a_path_that_is_no_adapter_is_an_answer_not_a_crash(hooked: Hooked, path: str) -> None:
    assert hooked.hooks.answer(BindFolder(1, path)).error is not None


def test_poison_changes_no_answer_and_leaves_running_blocks_alone(hooked: Hooked) -> None:
    world, digest = hooked.world, hooked.bind(hooked.folder)
    expected = {None: hooked.generate(None, 40), digest: hooked.generate(digest, 40)}
    requests = {key: world.request(PROMPT, key, 40) for key in expected}
    for request in requests.values():
        world.engine.add(request)
    events = []
    while world.engine.has_requests:
        reply = hooked.hooks.answer(PoisonFree(1))
        held = sum(len(request.block_ids) for request in world.engine.scheduler.running)
        assert reply.body == {"kv_blocks": world.engine.pool.num_blocks - held, "slots": 1}
        events += world.engine.step()
    for key, request in requests.items():
        assert text_ids([event for event in events if event.request_id == request.request_id]) == expected[key]


def test_poisoned_blocks_hold_nothing_but_nan_and_no_prefix(hooked: Hooked) -> None:
    hooked.generate(None)
    hooked.hooks.answer(PoisonFree(1))
    cache = hooked.world.engine._runner._cache
    assert all(torch.isnan(tensor).all() for tensor in (*cache.k, *cache.v))
    hits = hooked.world.engine.scheduler.num_prefix_hits
    assert hooked.generate(None) == hooked.generate(None)
    assert hooked.world.engine.scheduler.num_prefix_hits == hits + len(PROMPT) - 1
    hooked.world.engine.check_integrity()


def test_a_poisoned_slot_is_whole_again_for_the_next_adapter(hooked: Hooked, tiny_llama: Path) -> None:
    few = hooked.bind(write_adapter(hooked.tmp / "few", tiny_llama, targets=["k_proj"]))
    expected = hooked.generate(few)
    hooked.world.engine.residency.drop(few)
    hooked.hooks.answer(PoisonFree(1))
    assert hooked.generate(few) == expected


def test_a_request_is_killed_once_it_has_its_tokens_and_its_neighbour_is_not(hooked: Hooked) -> None:
    world = hooked.world
    expected = hooked.generate(None, 12)
    doomed, other = world.request(PROMPT, None, 12), world.request(PROMPT, None, 12)
    doomed.request_id, other.request_id = "req_a-0", "req_b-0"
    hooked.hooks.answer(KillRequest(1, "req_a", 5))
    for request in (doomed, other):
        world.engine.add(request)
    events = []
    while world.engine.has_requests:
        events += [*world.engine.step(), *hooked.hooks.kill_doomed()]
    of_doomed = [event for event in events if event.request_id == "req_a-0"]
    assert text_ids(of_doomed) == expected[:5]
    assert of_doomed[-1].error is not None
    assert (of_doomed[-1].finish, of_doomed[-1].error.code) == ("error", "internal_error")
    assert text_ids([event for event in events if event.request_id == "req_b-0"]) == expected
    assert world.engine.pool.num_free == world.engine.pool.num_blocks
    world.engine.check_integrity()
