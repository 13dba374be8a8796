"""Each rule with traffic that triggers it, traffic that does not, and too little to say anything."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loraplex.advise.advise import give_advice
from loraplex.advise.fact import AdapterFacts, Call, EngineFacts, Facts, PrefixFacts, TenantFacts
from loraplex.advise.finding import Finding
from loraplex.advise.slot import choose_slots, count_distances

NOW = datetime(2027, 1, 31, 12, tzinfo=UTC)
URL = "http://engine"
DIGESTS = ["sha256:" + f"{i:064x}" for i in range(20)]


def engine(**changes: Any) -> EngineFacts:
    fields = {"name": "main-1", "url": URL, "base": "tiny", "max_model_len": 8192, "max_num_seqs": 16, "max_loras": 8}
    return EngineFacts(**fields | {"kv_tokens": 65_536, "kv_bytes": 1 << 30, "is_caching": True} | changes)


def call(**changes: Any) -> Call:
    fields = {"base": "tiny", "tenant_id": "t1", "digest": DIGESTS[0], "replica": URL, "prompt_tokens": 300}
    return Call(**fields | {"completion_tokens": 100, "prefill_s": 0.1} | changes)


def find(rule: str, **facts: Any) -> Finding:
    found = [one for one in give_advice(Facts(now=NOW, **facts)) if one.rule == rule]
    assert len(found) == 1, found
    return found[0]


# --max-model-len


def test_length_that_hardly_a_request_needs_is_lowered_to_what_99_percent_have_and_a_quarter() -> None:
    calls = [call(prompt_tokens=100 + i, completion_tokens=0) for i in range(1000)]
    found = find("max_model_len", engines=[engine()], calls=calls)
    assert (found.state, found.flag) == ("advice", "--max-model-len 1536")
    assert found.evidence["p99_len"] == 1089
    assert found.evidence["num_longer"] == 0
    assert "42 requests of full length instead of 8" in found.effect


def test_effect_tells_how_many_requests_the_new_length_would_have_refused() -> None:
    calls = [call(prompt_tokens=100, completion_tokens=50)] * 995 + [call(prompt_tokens=5000)] * 5
    found = find("max_model_len", engines=[engine()], calls=calls)
    assert found.flag == "--max-model-len 256"
    assert found.evidence["num_longer"] == 5
    assert "5 of the 1,000 (0.5 %) would have been refused" in found.effect


def test_length_that_is_used_stays() -> None:
    found = find("max_model_len", engines=[engine()], calls=[call(prompt_tokens=3500)] * 600)
    assert (found.state, found.flag) == ("fine", "")


def test_lengths_of_few_requests_or_failed_ones_say_nothing() -> None:
    calls = [call()] * 499 + [call(outcome="error", completion_tokens=0)] * 100
    found = find("max_model_len", engines=[engine()], calls=calls)
    assert found.state == "not_enough"
    assert "499 requests seen, 500 needed" in found.message


# --max-num-seqs


def test_seats_are_lowered_below_where_preemptions_begin() -> None:
    busy = engine(preemptions=40, preempted_at=11, prefixes=PrefixFacts(requests=1000))
    found = find("max_num_seqs", engines=[busy])
    assert (found.state, found.flag) == ("advice", "--max-num-seqs 10")
    assert "40 preemptions over 1,000 requests" in found.message


def test_seats_stay_where_hardly_a_request_is_preempted() -> None:
    quiet = engine(preemptions=9, preempted_at=11, prefixes=PrefixFacts(requests=1000))
    assert find("max_num_seqs", engines=[quiet]).state == "fine"


def test_one_request_that_is_preempted_alone_is_no_matter_of_seats() -> None:
    alone = engine(preemptions=500, preempted_at=1, prefixes=PrefixFacts(requests=1000))
    found = find("max_num_seqs", engines=[alone])
    assert (found.state, found.flag) == ("fine", "")
    assert "KV cache is too small" in found.message


def test_seats_of_an_engine_that_has_hardly_served_are_not_judged() -> None:
    new = engine(preemptions=50, preempted_at=3, prefixes=PrefixFacts(requests=199))
    assert find("max_num_seqs", engines=[new]).state == "not_enough"


# --max-loras


def turns(num_adapters: int, num_slots: int, num_calls: int = 400) -> list[Call]:
    """Calls of adapters in turn, each loaded where an LRU of so many slots had not kept it."""
    slots: list[str] = []
    calls = []
    for i in range(num_calls):
        digest = DIGESTS[i % num_adapters]
        calls.append(call(digest=digest, load_bytes=0 if digest in slots else 1 << 20))
        slots = [digest, *(one for one in slots if one != digest)][:num_slots]
    return calls


def test_slots_are_raised_to_where_calls_load_nothing_again() -> None:
    found = find("max_loras", engines=[engine()], calls=turns(12, 8))
    assert (found.state, found.flag) == ("advice", "--max-loras 12")
    assert found.evidence["loads_again"] == 400 - 12
    assert found.evidence["expected_loads_again"] == 0
    assert found.evidence["more_bytes"] == 4 << 20


def test_slots_stay_where_all_adapters_have_one() -> None:
    found = find("max_loras", engines=[engine()], calls=turns(8, 8))
    assert (found.state, found.evidence["loads_again"]) == ("fine", 0)


def test_slots_are_not_judged_by_calls_of_the_base_or_of_another_engine() -> None:
    calls = [*turns(12, 8)[:100], *[call(digest=None)] * 500, *[call(replica="http://other")] * 500]
    found = find("max_loras", engines=[engine()], calls=calls)
    assert found.state == "not_enough"
    assert found.evidence["adapter calls_seen"] == 100


def test_fewest_slots_are_those_that_a_simulated_slot_table_needs() -> None:
    rng = random.Random(1)
    digests = [DIGESTS[min(19, int(rng.expovariate(0.25)))] for _ in range(3000)]

    def count_misses(num_slots: int) -> int:
        slots: list[str] = []
        again = 0
        seen = set()
        for digest in digests:
            again += digest in seen and digest not in slots
            seen.add(digest)
            slots = [digest, *(one for one in slots if one != digest)][:num_slots]
        return again

    distances = count_distances(digests)
    for num_slots in (1, 4, 8, 15):
        assert sum(n for distance, n in distances.items() if distance > num_slots) == count_misses(num_slots)
    found = choose_slots(digests, 4)
    assert found is not None
    assert count_misses(found[0]) <= 30 < count_misses(found[0] - 1)


# prefixes


def prefixes(share: float, num_tokens: int = 1_000_000, **changes: int) -> PrefixFacts:
    return PrefixFacts(requests=1000, prompt_tokens=num_tokens, repeated_tokens=round(share * num_tokens), **changes)


def test_missed_prefixes_are_worth_a_larger_cache_and_their_seconds_are_told() -> None:
    calls = [call(prompt_tokens=1000, cached_tokens=200, prefill_s=0.5)] * 100
    found = find("prefix_cache", engines=[engine(prefixes=prefixes(0.8))], calls=calls)
    assert (found.state, found.flag) == ("advice", f"--kv-cache-memory-bytes {2 << 30}")
    assert found.evidence["repeated_share"] == 0.8
    assert found.evidence["cached_share"] == 0.2
    assert found.evidence["saved_prefill_s"] == pytest.approx(50 * 0.6 / 0.8)
    assert "60 % of prompt tokens, about 37.5 s of the 50.0 s of prefill" in found.effect


def test_cache_that_finds_what_repeats_stays() -> None:
    calls = [call(prompt_tokens=1000, cached_tokens=780)] * 100
    found = find("prefix_cache", engines=[engine(prefixes=prefixes(0.8))], calls=calls)
    assert (found.state, found.flag, found.effect) == ("fine", "", "")


def test_cache_that_is_off_is_switched_on_where_prefixes_repeat() -> None:
    found = find("prefix_cache", engines=[engine(prefixes=prefixes(0.5), is_caching=False)], calls=[call()] * 100)
    assert (found.state, found.flag) == ("advice", "--enable-prefix-caching")


@pytest.mark.parametrize("is_caching", [True, False])
def test_traffic_without_prefixes_needs_no_cache(*, is_caching: bool) -> None:
    found = find("prefix_cache", engines=[engine(prefixes=prefixes(0.05), is_caching=is_caching)], calls=[call()] * 100)
    assert found.state == "fine"
    assert "hardly matters" in found.message


@pytest.mark.parametrize("percent", [5, 15, 80, 95])
def test_share_is_that_of_all_engines_of_the_base_together(percent: int) -> None:
    engines = [
        engine(name="a", prefixes=prefixes(percent / 100, 300_000)),
        engine(name="b", prefixes=prefixes(percent / 100, 700_000)),
    ]
    found = find("prefix_cache", engines=engines, calls=[call()] * 100)
    assert found.evidence["repeated_share"] == percent / 100


def test_share_is_a_lower_bound_once_prefixes_were_forgotten() -> None:
    found = find("prefix_cache", engines=[engine(prefixes=prefixes(0.5, forgotten_blocks=1))], calls=[call()] * 100)
    assert str(found.evidence["is_exact"]).startswith("at least")


def test_few_prompts_say_nothing_of_prefixes() -> None:
    few = PrefixFacts(requests=99, prompt_tokens=9900, repeated_tokens=9000)
    assert find("prefix_cache", engines=[engine(prefixes=few)]).state == "not_enough"


# adapters


def adapter(name: str, digest: str = "", tenant: str = "team-x", **changes: Any) -> AdapterFacts:
    fields = {"tenant_id": f"id-{tenant}", "tenant": tenant, "name": name, "digests": (digest or f"sha256:{name}",)}
    times = {"created_at": NOW - timedelta(days=100), "called_at": NOW - timedelta(days=1)}
    return AdapterFacts(**fields | times | changes)


def test_adapters_that_nobody_calls_are_named() -> None:
    adapters = [
        adapter("used"),
        adapter("idle", called_at=NOW - timedelta(days=15)),
        adapter("never", called_at=None),
        adapter("new", called_at=None, created_at=NOW - timedelta(days=2)),
    ]
    found = find("idle_adapters", adapters=adapters, num_calls=500)
    assert found.state == "advice"
    assert (found.evidence["idle"], found.evidence["not_called"]) == (["team-x/idle"], ["team-x/never"])
    assert found.flag == "loraplex adapters delete team-x/idle"


def test_adapters_that_are_called_stay() -> None:
    assert find("idle_adapters", adapters=[adapter("a"), adapter("b")], num_calls=500).state == "fine"


def test_without_traffic_nobody_is_called_idle() -> None:
    found = find("idle_adapters", adapters=[adapter("a", called_at=None)], num_calls=99)
    assert found.state == "not_enough"


def test_adapters_with_the_same_bytes_are_found_within_one_tenant_and_for_the_platform_across() -> None:
    same = DIGESTS[0]
    adapters = [adapter("a", same), adapter("b", same), adapter("c", same, tenant="team-y"), adapter("d")]
    platform = find("same_adapters", adapters=adapters)
    assert platform.evidence["adapters"] == ["team-x/a", "team-x/b", "team-y/c"]
    tenant = find("same_adapters", adapters=adapters, tenant_id="id-team-x")
    assert tenant.evidence["adapters"] == ["team-x/a", "team-x/b"]
    lone = give_advice(Facts(now=NOW, adapters=adapters, tenant_id="id-team-y"))
    assert [one.rule for one in lone if one.rule == "same_adapters"] == []


# limits


def limited(**changes: Any) -> TenantFacts:
    return TenantFacts(**{"tenant_id": "t1", "name": "team-x", "limits": {"requests_per_minute": 100}} | changes)


def test_tenant_near_a_limit_in_its_busiest_minute_is_told_the_command() -> None:
    calls = [call(began_s=60.0 * 10 + i / 2) for i in range(85)] + [call(began_s=1e6 + 60 * i) for i in range(20)]
    found = find("limits", tenants=[limited()], calls=calls)
    assert found.state == "advice"
    assert found.evidence["requests_per_minute_used"] == 85
    assert found.flag == "loraplex tenants update team-x --limit requests_per_minute=130"


def test_tenant_near_the_tokens_of_its_month_is_told() -> None:
    tenant = limited(limits={"tokens_per_month": 1_000_000, "tokens_per_day": 900_000}, tokens_this_month=950_000)
    found = find("limits", tenants=[tenant], calls=[call(began_s=60.0 * i) for i in range(60)])
    assert found.state == "advice"
    assert found.flag == "loraplex tenants update team-x --limit tokens_per_month=1500000"


def test_tenant_far_from_its_limits_stays() -> None:
    found = find("limits", tenants=[limited()], calls=[call(began_s=60.0 * i) for i in range(60)])
    assert found.state == "fine"


def test_limits_of_a_tenant_that_hardly_calls_are_not_judged() -> None:
    found = find("limits", tenants=[limited()], calls=[call(began_s=1.0)] * 49)
    assert found.state == "not_enough"


# who hears what


def test_tenant_hears_of_its_own_alone_and_of_no_flag_of_engines() -> None:
    own = {"id-team-x": prefixes(0.4, 10_000)}
    facts = Facts(
        now=NOW,
        engines=[engine(prefixes=prefixes(0.9), tenant_prefixes=own, preemptions=900, preempted_at=9)],
        calls=[call(tenant_id="id-team-x")] * 600,
        adapters=[adapter("a", called_at=None), adapter("b", called_at=None, tenant="team-y")],
        tenants=[limited(tenant_id="id-team-x"), limited(tenant_id="id-team-y", name="team-y")],
        num_calls=1000,
        tenant_id="id-team-x",
    )
    found = give_advice(facts)
    assert {one.rule for one in found} == {"prefix_cache", "idle_adapters", "limits"}
    assert not any(one.flag.startswith("--") for one in found)
    assert not any("team-y" in repr(one) for one in found)
    share = next(one for one in found if one.rule == "prefix_cache")
    assert share.evidence["repeated_share"] == 0.4


def test_advice_comes_first_and_what_cannot_be_said_last() -> None:
    facts = Facts(
        now=NOW,
        engines=[engine(prefixes=prefixes(0.5), is_caching=False)],
        calls=[call()] * 250,
        adapters=[adapter("a"), adapter("b")],
        num_calls=500,
    )
    states = [one.state for one in give_advice(facts)]
    assert states == sorted(states, key=["advice", "fine", "not_enough"].index)
    assert set(states) == {"advice", "fine", "not_enough"}


def test_engine_that_says_nothing_is_not_judged() -> None:
    silent = EngineFacts(name="old", url=URL, base="tiny")
    found = give_advice(Facts(now=NOW, engines=[silent], calls=[call()] * 1000))
    assert [(one.rule, one.state) for one in found] == [("prefix_cache", "not_enough")]
