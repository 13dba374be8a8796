"""Cases of section 4: caches, batching, scheduling. Nobody meets another's K and V, weights, slot or turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from case_world import ADAPTERS, Cases, World
from engines import text_ids
from loraplex_engine.core.request import Request
from loraplex_engine.wire.messages import TokenEvent, TokenLogprobs

PROMPT = [(37 * i + 11) % 300 + 3 for i in range(48)]
TURNS = [None, "F01", "F07", None]


@pytest.fixture(scope="module")
def world(cases: Cases) -> World:
    return cases.world(max_loras=len(ADAPTERS), max_num_seqs=32)


def step_until(world: World, condition: Any) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for _ in range(10_000):
        if condition():
            return events
        events += world.engine.step()
    raise AssertionError("nothing happened")


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 33, 48])
@pytest.mark.endure
def test_b068_b069_prefixes_are_no_bridge_between_adapters_in_any_order(
    cases: Cases, num_tokens: int, long: Callable[[float, float], float]
) -> None:
    world = cases.world(max_num_seqs=1)
    clean = cases.world(enable_prefix_caching=False)
    prompt = PROMPT[:num_tokens]
    # the second half differs, so that only part of the prompt is known
    other = prompt[: num_tokens // 2] + [7] * (num_tokens - num_tokens // 2)
    expected = {(name, n): clean.answer(name, ids, 4) for name in TURNS for n, ids in enumerate((prompt, other))}
    assert len({tuple(answer) for answer in expected.values()}) == len(expected)
    for number, order in enumerate(list(itertools.permutations(TURNS))[:: int(long(3, 1))]):
        for name, (n, ids) in itertools.product(order, enumerate((prompt, other))):
            request = world.ask(name, ids, 4)
            request.tenant_id = f"t{number}"
            assert text_ids(world.run([request])[request.request_id]) == expected[name, n], (order, name, n)
    assert world.engine.scheduler.num_prefix_hits > 0 or num_tokens <= 16


@pytest.mark.parametrize("num_shared", [15, 16, 17])
@pytest.mark.endure
def test_b069_choices_and_a_block_s_worth_in_common_are_no_bridge_in_any_order(
    cases: Cases, num_shared: int, long: Callable[[float, float], float]
) -> None:
    orders = list(itertools.permutations(TURNS))[:: int(long(3, 1))]
    world = cases.world(max_num_seqs=1, max_loras=1)
    clean = cases.world(enable_prefix_caching=False)
    prompts = (PROMPT, PROMPT[:num_shared] + [7] * (len(PROMPT) - num_shared))

    def answer(world: World, name: str | None, ids: list[int], tenant: str = "") -> list[list[int]]:
        requests = [world.ask(name, ids, 3, temperature=1.0, seed=5, choice=choice) for choice in range(2)]
        for request in requests:
            request.tenant_id = tenant
        events = world.run(requests)
        return [text_ids(events[request.request_id]) for request in requests]

    expected = {(name, n): answer(clean, name, ids) for name in TURNS for n, ids in enumerate(prompts)}
    assert len({tuple(ids) for answers in expected.values() for ids in answers}) == 2 * len(expected)
    for number, order in enumerate(orders):
        for name, (n, ids) in itertools.product(order, enumerate(prompts)):
            assert answer(world, name, ids, f"t{number}") == expected[name, n], (order, name, n)
    assert world.engine.residency.slots.num_evictions > 0
    # a name's first turn finds what the prompts have in common, unless that is one token of a block, and its second
    # choice all but the last token; so do both choices of the base's second turn
    num_known = len(PROMPT) - 1
    assert world.engine.scheduler.num_prefix_hits == len(orders) * (
        3 * (min(num_shared, 16) + 2 * num_known) + 4 * num_known
    )


def test_b068_each_answer_is_the_one_that_peft_gives(world: World) -> None:
    for name in TURNS:
        for _ in range(2):
            request = world.ask(name, PROMPT, 16)
            world.check_answer(request, world.run([request])[request.request_id])


@pytest.mark.parametrize("num_slots", [2, 3])
def test_b071_loads_during_decode_never_reach_running_requests(cases: Cases, num_slots: int) -> None:
    world = cases.world(max_loras=num_slots)

    def decode(disturbs: bool) -> list[list[int]]:
        requests = [world.ask(name, PROMPT, 300) for name in ("F01", "F02")]
        for request in requests:
            world.engine.add(request)
        events = step_until(world, lambda: all(request.output_ids for request in requests))
        visitors: list[Request] = []
        for number in itertools.count():
            if not any(request in world.engine.scheduler.running for request in requests):
                break
            if disturbs and number % 3 == 0:
                digest = world.digest_of[("F03", "F04", "F07")[number // 3 % 3]]
                assert digest is not None
                if number % 2:
                    world.engine.residency.drop(digest)
                world.engine.poison()
                visitors.append(world.request(PROMPT[:9], digest, 2))
                world.engine.add(visitors[-1])
            events += world.engine.step()
        for visitor in visitors:
            world.engine.abort(visitor.request_id)
        world.check_idle()
        return [text_ids([e for e in events if e.request_id == request.request_id]) for request in requests]

    control = decode(disturbs=False)
    assert decode(disturbs=False) == control
    evictions = world.engine.residency.slots.num_evictions
    assert decode(disturbs=True) == control
    assert [len(answer) for answer in control] == [300, 300]
    if num_slots == 3:
        assert world.engine.residency.slots.num_evictions > evictions


def test_b072_one_prompt_to_four_adapters_in_one_batch_gives_four_answers(world: World) -> None:
    names = ["F01", "F02", "F03", "F04"]
    found = world.logits(*((name, PROMPT) for name in names))
    assert all(world.is_parity(name, PROMPT, logits) for name, logits in zip(names, found, strict=True))
    assert all((a - b).abs().max() > 0.1 for a, b in itertools.combinations(found, 2))


def test_b074_ranks_of_all_sizes_share_a_batch_in_any_order(world: World) -> None:
    names = [None, "F20", "F02", "F01", "F03"]
    expected = dict(zip(names, world.logits(*((name, PROMPT) for name in names)), strict=True))
    for name, logits in expected.items():
        assert world.is_parity(name, PROMPT, logits), name
    for order in (names[::-1], names[2:] + names[:2], ["F03", None, "F01", "F20", "F02"]):
        for name, logits in zip(order, world.logits(*((name, PROMPT) for name in order)), strict=True):
            assert torch.equal(logits, expected[name]), (order, name)


def test_b075_adapters_without_a_row_in_the_step_leave_the_base_alone(cases: Cases) -> None:
    world = cases.world(max_num_seqs=8)
    before = world.logits((None, PROMPT))[0], world.answer(None, PROMPT, 16)
    for name in ("F01", "F07"):
        world.answer(name, PROMPT, 4)
    assert torch.equal(world.logits((None, PROMPT))[0], before[0])
    base, adapted = world.ask(None, PROMPT, 16), [world.ask(name, PROMPT, 3) for name in ("F01", "F07")]
    events = world.run([base, *adapted])
    assert text_ids(events[base.request_id]) == before[1]
    assert torch.equal(world.logits((None, PROMPT))[0], before[0])
    world.check_idle()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9, "top_p": 0.9, "seed": 1},
        {"stop_token_ids": (9, 17)},
        {"frequency_penalty": 1.0, "logprobs": 3},
        {"repetition_penalty": 1.3, "temperature": 0.9, "seed": 1, "logprobs": 0},
    ],
    ids=str,
)
def test_b077_preempted_requests_lose_and_repeat_nothing(cases: Cases, params: dict[str, Any]) -> None:
    prompts = [[(7 * i + j) % 290 + 3 for j in range(40)] for i in range(6)]
    names = [None, "F01", "F07", None, "F20", "F02"]

    def answer(**settings: Any) -> tuple[World, list[list[int]], list[tuple[str | None, int, list[TokenLogprobs]]]]:
        world = cases.world(**settings)
        requests = [world.ask(name, ids, 60, **params) for name, ids in zip(names, prompts, strict=True)]
        found = world.run(requests)
        counted = []
        for request in requests:
            events = found[request.request_id]
            assert events[-1].stats is not None
            told = [entry for event in events for entry in event.logprobs]
            assert len(told) == (0 if params.get("logprobs") is None else len(text_ids(events)))
            counted.append((events[-1].finish, events[-1].stats.completion_tokens, told))
        world.check_idle()
        return world, [text_ids(found[request.request_id]) for request in requests], counted

    _, expected, counts = answer(enable_prefix_caching=False)
    block_bytes = 2 * 2 * 16 * 2 * 20 * 4
    world, ids, counted = answer(kv_cache_memory_bytes=16 * block_bytes)
    assert world.engine.scheduler.num_preemptions > 0
    assert (ids, counted) == (expected, counts)


def test_b078_a_prompt_of_an_adapter_is_cached_for_its_tenant_alone(world: World) -> None:
    prompt = [(11 * i) % 290 + 3 for i in range(512)]

    def send(tenant: str) -> tuple[int, int, list[int]]:
        request = world.ask("F01", prompt)
        request.tenant_id = tenant
        computed = world.engine.metrics.registry.get_sample_value("loraplex_step_tokens_sum") or 0.0
        events = world.run([request])[request.request_id]
        computed = (world.engine.metrics.registry.get_sample_value("loraplex_step_tokens_sum") or 0.0) - computed
        assert events[-1].stats is not None
        return events[-1].stats.cached_tokens, int(computed), text_ids(events)

    first, again, stranger = send("a"), send("a"), send("b")
    assert (first[0], again[0] >= 496, stranger[0]) == (0, True, 0)
    assert again[1] <= 16 + 8 < 512 <= first[1] == stranger[1]
    assert first[2] == again[2] == stranger[2]


@pytest.mark.parametrize("name", [None, "F01"])
def test_b079_an_aborted_request_is_gone_at_once(world: World, name: str | None) -> None:
    request = world.ask(name, PROMPT, 400)
    world.engine.add(request)
    step_until(world, lambda: len(request.output_ids) >= 3)
    world.engine.abort(request.request_id)
    world.check_idle()
    assert world.engine.step() == []
    assert len(request.output_ids) == 3


def test_b083_requests_aborted_while_their_adapter_loads_hold_nothing(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cases.world()
    with monkeypatch.context() as patch:
        patch.setattr(world.loader, "take_finished", list)
        requests = [world.ask("F01", PROMPT, 20) for _ in range(500)]
        for request in requests:
            world.engine.add(request)
            world.engine.step()
        assert world.engine.residency.loading_digests == (world.digest_of["F01"],)
        for request in requests:
            world.engine.abort(request.request_id)
        world.check_idle()
    step_until(world, lambda: not world.engine.residency.loading_digests)
    world.check_idle()
    request = world.ask("F01", PROMPT)
    world.check_answer(request, world.run([request])[request.request_id])


@pytest.mark.parametrize("name", [None, "F01"])
@pytest.mark.parametrize("num_read", [1, 9, 33])
def test_b084_an_abandoned_turn_leaves_no_trace_in_the_next(
    cases: Cases, world: World, name: str | None, num_read: int
) -> None:
    clean = cases.world(enable_prefix_caching=False)
    left = world.ask(name, PROMPT, 64)
    world.engine.add(left)
    step_until(world, lambda: len(left.output_ids) >= num_read)
    world.engine.abort(left.request_id)
    for prompt in (PROMPT, PROMPT + left.output_ids + [5]):
        request = world.ask(name, prompt, 16)
        events = world.run([request])[request.request_id]
        assert events[-1].stats is not None
        assert events[-1].stats.prompt_tokens == len(prompt)
        assert text_ids(events) == clean.answer(name, prompt, 16)
