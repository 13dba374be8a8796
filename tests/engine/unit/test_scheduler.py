from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples import examples
from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepResult
from loraplex_engine.errors import (
    AdapterQuarantinedError,
    DigestMismatchError,
    LoadFailedError,
    QueueFullError,
    RequestError,
    StepFailedError,
    TooLargeForCacheError,
)
from loraplex_engine.scheduling.advice import find_onset
from loraplex_engine.wire.messages import SamplingParams, TokenEvent, TokenLogprobs
from schedules import EOS, World, code_of, shape


def test_long_prompt_is_computed_in_chunks_beside_decoding_requests() -> None:
    world = World()
    world.request("short", [31, 32])
    world.step()
    world.request("long", 18)
    assert shape(world.step()[0]) == [("short", 2, 1, True), ("long", 0, 7, False)]
    assert shape(world.step()[0]) == [("short", 3, 1, True), ("long", 7, 7, False)]
    assert shape(world.step()[0]) == [("short", 4, 1, True), ("long", 14, 4, True)]


def test_a_request_without_tokens_is_refused_and_holds_nobody_back() -> None:
    world = World()
    with pytest.raises(RequestError, match="no tokens"):
        world.request("nothing", 0)
    world.request("behind")
    assert shape(world.step()[0]) == [("behind", 0, 4, True)]


def test_admission_skips_request_whose_adapter_is_not_ready() -> None:
    world = World()
    world.request("cold", digest="d1")
    world.request("base")
    assert shape(world.step()[0]) == [("base", 0, 4, True)]
    assert world.loader.started == ["d1"]
    world.loader.finish("d1")
    world.residency.poll()
    assert ("cold", 0, 4, True) in shape(world.step()[0])


def test_rows_of_different_adapters_and_the_base_share_a_step() -> None:
    world = World(budget=32)
    world.load("d1", "d2")
    for name, digest in (("a", "d1"), ("b", "d2"), ("c", None), ("d", "d1")):
        world.request(name, digest=digest)
    plan, _ = world.step()
    assert [row.request.slot for row in plan.rows] == [0, 1, -1, 0]
    assert plan.num_adapters == 2


def test_more_adapters_than_slots_take_turns() -> None:
    world = World(num_slots=1, budget=32)
    world.load("d1", "d2")
    first = world.request("first", digest="d1", max_tokens=2)
    world.request("second", digest="d2", max_tokens=2)
    assert [row.request.request_id for row in world.step()[0].rows] == ["first"]
    world.step()
    assert first.slot == -1
    assert [row.request.request_id for row in world.step()[0].rows] == ["second"]
    assert world.bank.bound == {0: "d2"}


def test_bytes_of_an_adapter_are_charged_to_the_request_for_which_it_was_put_into_a_slot() -> None:
    world = World(num_slots=1, budget=32, max_num_seqs=1)
    world.load("d1", "d2")
    names = {"first": "d1", "same": "d1", "other": "d2", "again": "d1", "base": None}
    requests = [world.request(name, digest=digest, max_tokens=1) for name, digest in names.items()]
    spent: dict[str, int] = {}
    while world.scheduler.waiting or world.scheduler.running:
        for event in world.step()[1]:
            assert event.stats is not None
            spent[event.request_id] = event.stats.load_bytes
        world.clock.now += 3
    assert world.residency.num_binds == 3
    assert spent == {"first": 64, "same": 0, "other": 64, "again": 64, "base": 0}
    assert [request.load_bytes for request in requests] == list(spent.values())


def test_steady_stream_of_one_adapter_yields_to_a_starved_one_after_the_lease() -> None:
    world = World(num_slots=1, budget=32)
    world.load("hot", "cold")
    world.request("h0", digest="hot", max_tokens=3)
    world.step()
    world.request("starved", digest="cold")
    names = []
    for index in range(1, 12):
        world.request(f"h{index}", digest="hot", max_tokens=3)
        world.clock.now += 0.3
        names += [row.request.request_id for row in world.step()[0].rows]
    assert "starved" in names


def test_youngest_request_is_preempted_and_recomputed_when_blocks_run_out() -> None:
    world = World(num_blocks=4, budget=32)
    old = world.request("old", 7, max_tokens=9)
    young = world.request("young", 7, max_tokens=9)
    tokens: dict[str, list[int]] = {"old": [], "young": []}
    for token in range(10, 40):
        plan, events = world.step(token)
        for event in events:
            tokens[event.request_id] += event.token_ids
        if not plan.rows:
            break
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert len(tokens["old"]) == len(tokens["young"]) == 9
    assert world.pool.num_free == 4


def test_second_equal_prompt_starts_from_cached_blocks_but_computes_its_last_token() -> None:
    world = World(budget=32)
    world.request("one", 8, max_tokens=1)
    world.step()
    two = world.request("two", 8, max_tokens=1)
    assert shape(world.step()[0]) == [("two", 7, 1, True)]
    assert two.num_cached == 7


def test_nothing_is_reused_when_prefix_caching_is_off() -> None:
    world = World(budget=32, enable_prefix_caching=False)
    for name in ("one", "two"):
        request = world.request(name, 8, max_tokens=1)
        assert shape(world.step()[0]) == [(name, 0, 8, True)]
        assert request.num_cached == 0


def test_prefix_is_not_shared_between_adapters_or_tenants() -> None:
    world = World(budget=32)
    world.load("d1")
    world.request("base", 8, max_tokens=1)
    world.step()
    other = world.request("adapter", 8, "d1", max_tokens=1)
    world.scheduler.add(tenant := Request("tenant", list(range(1, 9)), SamplingParams(1), tenant_id="other"))
    world.step()
    assert (other.num_cached, tenant.num_cached) == (0, 0)


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "text"),
    [
        ({}, [7, EOS], "stop", [7]),
        ({"ignore_eos": True, "max_tokens": 3}, [7, EOS, 8], "length", [7, EOS, 8]),
        ({"stop_token_ids": (9,)}, [7, 9], "stop", [7]),
        ({"max_tokens": 2}, [7, 8], "length", [7, 8]),
        ({"min_tokens": 2, "max_tokens": 4}, [7, 8, EOS], "stop", [7, 8]),
    ],
)
def test_request_ends_for_the_stated_reason(
    params: dict[str, object], tokens: list[int], finish: str, text: list[int]
) -> None:
    world = World()
    world.request("r", **{"max_tokens": 8, **params})  # type: ignore[arg-type]
    events = [event for token in tokens for event in world.step(token)[1]]
    assert [event.finish for event in events] == [None] * (len(tokens) - 1) + [finish]
    assert [token for event in events for token in event.token_ids] == text
    assert events[-1].stats is not None
    assert events[-1].stats.completion_tokens == len(tokens)
    assert world.pool.num_free == 16


def test_context_limit_ends_a_request() -> None:
    world = World(num_blocks=64, budget=64)
    world.request("r", 62, max_tokens=100)
    assert [world.step()[1][0].finish for _ in range(2)] == [None, "length"]


def test_abort_gives_back_blocks_and_pin_at_once_wherever_the_request_is() -> None:
    world = World()
    world.load("d1")
    world.request("running", digest="d1")
    world.step()
    world.request("loading", digest="d9")
    for name in ("running", "loading"):
        event = world.scheduler.abort(name, "abort")
        assert event is not None
        assert event.finish == "abort"
    world.scheduler.check_integrity()
    assert world.pool.num_free == 16
    assert world.scheduler.abort("running", "abort") is None


def test_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(TooLargeForCacheError):
        World(num_blocks=2).request("big", 8, max_tokens=8)


def test_failed_load_ends_waiting_requests_and_refuses_new_ones_until_the_backoff_is_over() -> None:
    world = World()
    world.request("waits", digest="bad")
    world.step()
    world.loader.fail("bad")
    (digest,) = world.residency.poll()
    error = world.residency.find_failure(digest)
    assert isinstance(error, LoadFailedError)
    (event,) = world.scheduler.fail_waiting(digest, error)
    assert event.error is not None
    assert event.error.code == "adapter_loading"
    with pytest.raises(LoadFailedError):
        world.request("soon", digest="bad")
    world.clock.now += 2
    world.request("later", digest="bad")
    world.step()
    assert world.loader.started == ["bad"]


def test_waits_are_bounded() -> None:
    world = World(max_num_seqs=1)
    world.request("runs", max_tokens=30)
    world.step()
    world.request("queued")
    world.request("cold", digest="d1")
    world.step()
    world.clock.now += 31
    world.scheduler.schedule()
    codes = {event.request_id: event.error and event.error.code for event in world.scheduler.expire()}
    assert codes == {}
    world.clock.now += 30
    codes = {event.request_id: event.error and event.error.code for event in world.scheduler.expire()}
    assert codes == {"queued": "queue_full", "cold": "queue_full"}


def test_adapter_that_does_not_arrive_is_named_as_the_cause() -> None:
    world = World()
    world.request("cold", digest="d1")
    world.step()
    world.clock.now += 31
    (event,) = world.scheduler.expire()
    assert event.error is not None
    assert event.error.code == "adapter_loading"


def test_logprobs_go_with_their_token_and_not_with_a_hidden_ending() -> None:
    world = World()
    world.request("told", logprobs=1)
    told = TokenLogprobs(-0.5, [(7, -0.5)])
    plan = world.scheduler.schedule()
    events = world.scheduler.update(plan, StepResult({"told": 7}, logprobs={"told": told}))
    assert [(event.token_ids, event.logprobs) for event in events] == [([7], [told])]
    plan = world.scheduler.schedule()
    events = world.scheduler.update(plan, StepResult({"told": EOS}, logprobs={"told": told}))
    assert [(event.token_ids, event.logprobs, event.finish) for event in events] == [([], [], "stop")]


def test_invalid_output_ends_only_its_own_request() -> None:
    world = World(budget=32)
    world.load("d1")
    world.request("good")
    world.request("bad", digest="d1")
    world.request("bad base")
    plan = world.scheduler.schedule()
    events = world.scheduler.update(plan, StepResult({"good": 7}, frozenset({"bad", "bad base"})))
    assert {event.request_id: event.error and event.error.code for event in events} == {
        "good": None,
        "bad": "adapter_output_invalid",
        "bad base": "internal_error",
    }
    world.scheduler.check_integrity()


def test_no_block_of_a_request_whose_numbers_went_bad_is_found_by_another() -> None:
    world = World(budget=8)
    world.load("d1")
    world.request("bad", 13, "d1")
    world.step()
    again = world.request("early", 13, "d1")
    plan = world.scheduler.schedule()
    assert again.num_cached == 0
    assert [row.request.request_id for row in plan.rows if row.samples] == ["bad"]
    world.scheduler.update(plan, StepResult({}, frozenset({"bad"})))
    later = world.request("later", 13, "d1")
    world.scheduler.abort("early", "abort")
    world.step()
    assert later.num_cached == 0


def test_step_that_fails_ends_its_own_requests_and_gives_back_their_blocks() -> None:
    world = World(budget=4)
    world.request("in the step")
    world.request("behind it")
    plan = world.scheduler.schedule()
    (event,) = world.scheduler.fail_plan(plan, StepFailedError())
    assert (event.request_id, event.finish) == ("in the step", "error")
    world.scheduler.check_integrity()
    assert shape(world.step()[0]) == [("behind it", 0, 4, True)]


def test_adapter_dropped_on_its_way_is_not_kept_unless_it_is_wanted_again() -> None:
    world = World()
    world.residency.prefetch("d1")
    world.residency.drop("d1")
    assert world.residency.is_draining("d1")
    world.loader.finish("d1")
    world.residency.poll()
    assert not world.residency.is_draining("d1")
    assert world.residency.host_digests == ()
    world.residency.prefetch("d2")
    world.residency.drop("d2")
    world.request("again", digest="d2")
    world.step()
    world.loader.finish("d2")
    world.residency.poll()
    assert shape(world.step()[0]) == [("again", 0, 4, True)]


def test_queue_of_more_adapters_than_host_memory_loads_each_once() -> None:
    world = World(num_slots=1, max_host=2, budget=32)
    names = [f"d{index}" for index in range(8)]
    for name in names:
        world.request(name, digest=name, max_tokens=1)
    loads, done = [], []
    for _ in range(60):
        world.clock.now += 0.1
        done += [event.request_id for event in world.step()[1]]
        loads += world.loader.started
        for digest in list(world.loader.started):
            world.loader.finish(digest)
        world.residency.poll()
        world.scheduler.check_integrity()
    assert done == names
    assert loads == names


def test_adapter_acts_from_the_last_invocation_in_the_prompt() -> None:
    world = World(num_blocks=32, budget=64)
    world.loader.invocation_ids["d1"] = (8, 9)
    world.load("d1", "plain")
    requests = [
        world.request("twice", [8, 9, 1, 8, 9, 5], "d1"),
        world.request("at the end", [1, 2, 3, 8, 9], "d1"),
        world.request("half", [8, 9, 1, 8], "d1"),
        world.request("plain", [8, 9], "plain"),
        world.request("base", [8, 9]),
    ]
    world.step()
    assert [request.adapter_start for request in requests] == [3, 3, 0, 0, 0]


@pytest.mark.parametrize("prompt", [[1, 2, 3], [9, 8], [8], [1, 8]])
def test_prompt_without_the_invocation_is_refused_and_never_answered_as_the_base(prompt: list[int]) -> None:
    world = World(budget=64)
    world.loader.invocation_ids["d1"] = (8, 9)
    world.load("d1")
    world.request("r", prompt, "d1")
    world.request("next", [8, 9], "d1")
    plan, events = world.step()
    assert [row.request.request_id for row in plan.rows] == ["next"]
    assert code_of(events[0]) == "alora_invocation_missing"
    assert events[0].error is not None
    assert "(8, 9)" in events[0].error.message
    assert world.residency.slots.slots[0].num_pins == 1


def test_blocks_before_an_invocation_are_shared_with_the_base_and_later_ones_with_nobody_else() -> None:
    world = World(num_blocks=64, budget=64, max_num_seqs=16)
    world.loader.invocation_ids |= {"d1": (8, 9), "d2": (8, 9)}
    world.load("d1", "d2")
    prompt = [*range(11, 19), 8, 9, *range(31, 38)]
    cached = {}
    for name, ids, digest in (
        ("base", prompt, None),
        ("one", prompt, "d1"),
        ("one again", prompt, "d1"),
        ("other", prompt, "d2"),
        ("base again", prompt, None),
        ("invoked later", [*prompt, 8, 9], "d1"),
    ):
        request = world.request(name, ids, digest, max_tokens=1)
        world.step()
        cached[name] = request.num_cached
    assert cached == {"base": 0, "one": 8, "one again": 16, "other": 8, "base again": 16, "invoked later": 16}


def test_block_in_which_an_adapter_begins_is_not_shared_with_one_where_it_begins_elsewhere() -> None:
    world = World(num_blocks=64, budget=64)
    world.loader.invocation_ids["d1"] = (8, 9)
    world.load("d1")
    first, second = [1, 8, 9, 8, 5, 6, 7, 8, 9], [1, 8, 9, 8, 9, 6, 7, 1, 2]
    assert first[:4] == second[:4]
    world.request("first", [*first[:7], 1, 2], "d1", max_tokens=1)
    world.step()
    request = world.request("second", second, "d1", max_tokens=1)
    world.step()
    assert (request.adapter_start, request.num_cached) == (3, 0)


def test_queue_that_is_full_says_so_at_once() -> None:
    world = World(max_waiting=2)
    world.request("one")
    world.request("two")
    with pytest.raises(QueueFullError):
        world.request("three")


def test_wait_for_an_adapter_is_bounded_by_its_own_limit_counted_from_its_own_start() -> None:
    world = World(max_num_seqs=1, adapter_load_timeout_s=120.0)
    world.request("runs", max_tokens=40)
    world.step()
    world.request("cold", digest="d1")
    world.clock.now += 50
    world.scheduler.abort("runs", "abort")
    world.step()
    world.clock.now += 100
    assert world.scheduler.expire() == []
    world.clock.now += 20
    (event,) = world.scheduler.expire()
    assert event.error is not None
    assert event.error.code == "adapter_loading"


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, loads, bad numbers, drops, aborts and steps: nothing leaks, drops end, everybody ends."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(num_blocks=12, num_slots=2, budget=6, queue_timeout_s=1e6, adapter_load_timeout_s=1e6)
        self.world.loader.invocation_ids["c"] = (2, 3)
        self.num_added = 0
        self.ended: list[str] = []

    @rule(prompt=st.integers(1, 16), tokens=st.integers(1, 8), digest=st.sampled_from([None, "a", "b", "c"]))
    def add(self, prompt: int, tokens: int, digest: str | None) -> None:
        try:
            self.world.request(str(self.num_added), prompt, digest, tokens)
        except (LoadFailedError, DigestMismatchError, AdapterQuarantinedError):
            return
        self.num_added += 1

    @precondition(lambda self: self.world.loader.started)
    @rule(data=st.data(), fails=st.sampled_from(["no", "no", "by its bytes", "from outside"]))
    def load(self, data: st.DataObject, fails: str) -> None:
        digest = data.draw(st.sampled_from(self.world.loader.started))
        if fails == "no":
            self.world.loader.finish(digest)
        else:
            self.world.loader.fail(digest, is_content=fails == "by its bytes")
        self._note(self.world.settle_loads())

    @precondition(lambda self: self.num_added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = str(data.draw(st.integers(0, self.num_added - 1)))
        event = self.world.scheduler.abort(name, "abort")
        assert (event is None) == (name in self.ended)
        if event is not None:
            self.ended.append(name)

    @rule(digest=st.sampled_from("abc"))
    def drop(self, digest: str) -> None:
        self.world.residency.drop(digest)

    @rule(digest=st.sampled_from("abc"), is_kept=st.booleans())
    def ask_for(self, digest: str, is_kept: bool) -> None:
        self.world.residency.welcome(digest)
        self.world.residency.prefetch(digest)
        if self.world.residency.try_make_ready(digest) is not None:
            self.world.residency.keep(digest, is_kept=is_kept)

    @rule()
    def meet_bad_numbers(self) -> None:
        self._note(self.world.step(is_invalid=lambda request, _: request.digest == "b")[1])

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @rule()
    def step(self) -> None:
        self._note(self.world.step()[1])

    @invariant()
    def holds_together(self) -> None:
        world = self.world
        world.scheduler.check_integrity()
        slots = world.residency.slots.slots
        assert world.bank.bound == {i: slot.digest for i, slot in enumerate(slots) if slot.digest is not None}
        assert world.residency.tier_to_bytes["slot"] == 64 * len(world.bank.bound)
        assert set(world.loader.started) == set(world.residency.loading_digests)

    def teardown(self) -> None:
        for digest in "abc":
            self.world.residency.keep(digest, is_kept=False)
        for _ in range(600):
            self.world.clock.now += 0.5
            for digest in list(self.world.loader.started):
                self.world.loader.finish(digest)
            self._note(self.world.settle_loads())
            self.step()
        assert sorted(self.ended) == sorted(str(index) for index in range(self.num_added))
        for digest in "abc":
            self.world.residency.drop(digest)
            assert not self.world.residency.is_draining(digest)
        assert self.world.pool.num_free == 12
        assert self.world.bank.bound == {}
        assert self.world.residency.tier_to_bytes == {"slot": 0, "host": 0, "disk": 0}

    def _note(self, events: list[TokenEvent]) -> None:
        self.ended += [event.request_id for event in events if event.finish]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(20), stateful_step_count=40, deadline=None)


def test_preemptions_are_counted_by_how_many_ran() -> None:
    world = World(num_blocks=6, budget=16, max_num_seqs=2, max_model_len=64)
    world.request("a", 9, max_tokens=8)
    world.request("b", list(range(50, 59)), max_tokens=8)
    while world.scheduler.running or world.scheduler.waiting:
        world.step(7)
    assert world.scheduler.running_to_preemptions == {2: world.scheduler.num_preemptions}
    assert world.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("counts", "onset"), [({}, None), ({5: 1}, 5), ({2: 1, 6: 9}, 6), ({2: 2, 6: 9}, 2), ({4: 3, 8: 100}, 8)]
)
def test_preemptions_begin_where_nine_of_ten_happened_or_above(counts: dict[int, int], onset: int | None) -> None:
    assert find_onset(counts) == onset
