"""Adapters that nobody calls, and adapters that are the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

from loraplex.advise.fact import AdapterFacts, Facts
from loraplex.advise.finding import Figure, Finding, say_too_little

MIN_CALLS = 100
_NEW = timedelta(days=7)
_IDLE = timedelta(days=14)
_MAX_NAMED = 20


def judge_idle(facts: Facts) -> Iterator[Finding]:
    """Advise on each tenant with adapters that were never called, or not for two weeks."""
    if not facts.adapters:
        return
    if facts.num_calls < MIN_CALLS:
        yield say_too_little("idle_adapters", "adapters", facts.num_calls, MIN_CALLS, "calls")
        return
    for tenant, adapters in sorted(_by_tenant(facts).items()):
        yield _judge_tenant(tenant, adapters, facts)


def judge_same(facts: Facts) -> Iterator[Finding]:
    """Advise on adapters whose live version has the same bytes; who asks sees no other tenant's."""
    digest_to_models = defaultdict(set)
    for adapter in facts.adapters:
        if facts.tenant_id in (None, adapter.tenant_id):
            for digest in adapter.digests:
                digest_to_models[digest].add(adapter.model)
    for digest, models in sorted(digest_to_models.items()):
        if len(models) > 1:
            yield _describe_same(digest, sorted(models))


def _by_tenant(facts: Facts) -> dict[str, list[AdapterFacts]]:
    found = defaultdict(list)
    for adapter in facts.adapters:
        if facts.tenant_id in (None, adapter.tenant_id):
            found[adapter.tenant].append(adapter)
    return found


def _judge_tenant(tenant: str, adapters: list[AdapterFacts], facts: Facts) -> Finding:
    old = [adapter for adapter in adapters if facts.now - adapter.created_at >= _NEW]
    never = [adapter.model for adapter in old if adapter.called_at is None]
    idle = [
        adapter.model for adapter in old if adapter.called_at is not None and facts.now - adapter.called_at >= _IDLE
    ]
    evidence: dict[str, Figure] = {
        "adapters": len(adapters),
        "idle": sorted(idle)[:_MAX_NAMED],
        "not_called": sorted(never)[:_MAX_NAMED],
        "num_idle": len(idle),
        "num_not_called": len(never),
        "remembered_days": facts.remembered_days,
    }
    if not (never or idle):
        message = f"All of {len(adapters):,} adapters are called, or new."
        return Finding(rule="idle_adapters", subject=tenant, state="fine", message=message, evidence=evidence)
    return Finding(
        rule="idle_adapters",
        subject=tenant,
        state="advice",
        message=(
            f"Of {len(adapters):,} adapters {len(never):,} were not called in the {facts.remembered_days} days that "
            f"are remembered, and {len(idle):,} not for {_IDLE.days} days."
        ),
        effect="What nobody calls is one less to keep, to pin and to look after; usage and audit stay.",
        flag=f"loraplex adapters delete {min([*never, *idle])}",
        evidence=evidence,
    )


def _describe_same(digest: str, models: list[str]) -> Finding:
    return Finding(
        rule="same_adapters",
        subject=", ".join(models[:_MAX_NAMED]),
        state="advice",
        message=f"{len(models):,} names lead to the same bytes.",
        effect="They share one slot as it is; one name less is one less to update and to roll back.",
        flag=f"loraplex adapters delete {models[-1]}",
        evidence={"digest": digest, "adapters": models[:_MAX_NAMED], "num_adapters": len(models)},
    )
