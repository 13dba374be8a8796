"""The share of prompt tokens that repeat a prefix: exact on known traffic, whatever the cache holds, and bounded."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from loraplex_engine.core.request import Request
from loraplex_engine.kv.prefix_history import PrefixCount, PrefixHistory
from loraplex_engine.kv.prefix_index import chain_hash, prefix_seed
from schedules import World

BLOCK = 4
LENGTH = 400


def small_world(*, is_caching: bool = True, num_blocks: int = 2 * (LENGTH // BLOCK)) -> World:
    """A pool of two prompts, so that hardly anything stays in the cache."""
    return World(
        num_blocks=num_blocks, budget=LENGTH, max_num_seqs=1, max_model_len=1024, enable_prefix_caching=is_caching
    )


def serve(world: World, name: str, prompt: list[int], tenant: str = "", max_tokens: int = 1, **fields: str) -> Request:
    """Run a request to its end; each token of the answer is 7."""
    request = world.request(name, prompt, tenant=tenant, max_tokens=max_tokens, **fields)
    while world.scheduler.running or world.scheduler.waiting:
        world.step(7)
    return request


def count(world: World) -> tuple[int, int, int]:
    total = world.scheduler.prefixes.history.total
    return total.requests, total.prompt_tokens, total.repeated_tokens


def numbers(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 1 << 30) for _ in range(length)]


class Truth:
    """Remembers every prefix of whole blocks as tokens, for ever."""

    def __init__(self) -> None:
        self.seen: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        self.repeated = 0

    def note(self, tenant: str, prompt: list[int], answer: list[int]) -> None:
        length = 0
        for stop in range(BLOCK, len(prompt), BLOCK):
            if tuple(prompt[:stop]) not in self.seen[tenant]:
                break
            length = stop
        self.repeated += length
        whole = [*prompt, *answer]
        self.seen[tenant] |= {tuple(whole[:stop]) for stop in range(BLOCK, len(whole), BLOCK)}


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("percent", [5, 15, 80, 95])
def test_known_share_is_measured_exactly(percent: int, *, is_caching: bool) -> None:
    rng = random.Random(percent)
    world = small_world(is_caching=is_caching)
    prefixes = {tenant: numbers(rng, LENGTH * percent // 100) for tenant in ("a", "b", "c")}

    def ask(i: int, tenant: str) -> None:
        prefix = prefixes[tenant]
        serve(world, f"{tenant}{i}", [*prefix, *numbers(rng, LENGTH - len(prefix))], tenant)

    for tenant in prefixes:
        ask(0, tenant)
    assert count(world) == (3, 3 * LENGTH, 0)
    for i in range(1, 11):
        for tenant in prefixes:
            ask(i, tenant)
    requests, prompt_tokens, repeated_tokens = count(world)
    assert (requests, prompt_tokens) == (33, 33 * LENGTH)
    assert repeated_tokens * 100 == percent * 30 * LENGTH
    assert world.scheduler.prefixes.history.num_forgotten == 0


@pytest.mark.parametrize("is_caching", [True, False])
def test_conversations_of_several_tenants_are_counted_as_somebody_who_forgets_nothing_would(
    *, is_caching: bool
) -> None:
    rng = random.Random(3)
    world, truth = small_world(is_caching=is_caching, num_blocks=120), Truth()
    systems = [numbers(rng, length) for length in (13, 32, 4)]
    talks: list[tuple[str, list[int]]] = []
    for i in range(120):
        if talks and rng.random() < 0.6:
            tenant, history = talks.pop(rng.randrange(len(talks)))
        else:
            tenant, history = rng.choice("ab"), list(rng.choice(systems))
        prompt = [*history, *numbers(rng, rng.randrange(1, 12))]
        if len(prompt) > 300:
            continue
        answer = serve(world, f"r{i}", prompt, tenant, max_tokens=rng.randrange(1, 9)).output_ids
        truth.note(tenant, prompt, answer)
        talks.append((tenant, [*prompt, *answer]))
    assert count(world)[2] == truth.repeated
    assert truth.repeated > 0
    if is_caching:
        assert world.scheduler.num_prefix_hits < truth.repeated


def test_prompt_that_repeats_whole_is_counted_but_for_the_block_of_its_last_token() -> None:
    world = small_world()
    for i in range(2):
        serve(world, f"r{i}", list(range(10, 10 + LENGTH)))
    assert count(world)[2] == LENGTH - BLOCK


def test_tenants_adapters_and_salts_share_nothing() -> None:
    prompt = list(range(10, 50))
    world = small_world()
    serve(world, "a", prompt, "a")
    serve(world, "b", prompt, "b")
    salted = Request("c", prompt, world.request("x", prompt, tenant="c", max_tokens=1).params, tenant_id="a")
    salted.cache_salt = "s"
    world.scheduler.add(salted)
    while world.scheduler.running or world.scheduler.waiting:
        world.step(7)
    assert count(world)[2] == 0
    counts = world.scheduler.prefixes.history.describe(8)
    assert counts["a"] == PrefixCount(2, 80, 0)
    assert counts["b"] == PrefixCount(1, 40, 0)


def test_preempted_request_is_counted_once() -> None:
    world = World(num_blocks=6, budget=16, max_num_seqs=2, max_model_len=64)
    world.request("a", 9, max_tokens=8)
    world.request("b", list(range(50, 59)), max_tokens=8)
    while world.scheduler.running or world.scheduler.waiting:
        world.step(7)
    assert world.scheduler.num_preemptions > 0
    assert count(world) == (2, 18, 0)


def chains(tenant: str, seed: int, num_blocks: int) -> list[bytes]:
    found, previous = [], prefix_seed(tenant)
    for index in range(num_blocks):
        previous = chain_hash(previous, [seed, index])
        found.append(previous)
    return found


def test_what_was_asked_for_longest_ago_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    history = PrefixHistory(BLOCK, max_hashes=200)
    old, new = chains("a", 0, 100), chains("a", 1, 150)
    history.note_prompt("a", old, 400)
    history.note_prompt("a", new, 600)
    history.check_integrity()
    assert history.num_forgotten == 64
    history.note_prompt("a", new, 600)
    assert history.total.repeated_tokens == 150 * BLOCK
    history.note_prompt("a", old, 400)
    assert history.total.repeated_tokens == (150 + 36) * BLOCK


def test_tenant_that_floods_forgets_its_own_prefixes() -> None:
    history = PrefixHistory(BLOCK, max_hashes=1000)
    quiet = chains("quiet", 0, 50)
    history.note_prompt("quiet", quiet, 200)
    for i in range(100):
        history.note_prompt("loud", chains("loud", i, 100), 400)
        history.check_integrity()
    history.note_prompt("quiet", quiet, 200)
    assert history.describe(8)["quiet"] == PrefixCount(2, 400, 200)
    assert history.num_forgotten >= 9_000


def test_tenants_that_are_kept_apart_are_bounded_and_all_are_in_the_total() -> None:
    history = PrefixHistory(BLOCK)
    for i in range(1500):
        history.note_prompt(f"t{i}", [], 10)
    history.note_prompt("t1499", [], 5)
    assert history.total == PrefixCount(1501, 15_005, 0)
    assert len(history.describe(10_000)) == 1024
    assert next(iter(history.describe(1))) == "t1499"
