"""The engine core's metrics. `EngineMetrics` owns one registry; nothing else registers in it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_HOST_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5)
# Quantiles are read off between two bounds, so those lie close where people look: first tokens of 20 ms to 5 s, gaps of
# 5 to 100 ms, answers of 0.5 to 60 s.
_FIRST_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0),
)
_GAP_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
_WHOLE_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0),
    *(45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0),
)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What the engine keeps count of by itself."""

    kv_usage_ratio: float
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_yields: int
    num_sampled: int
    num_base_gemms: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_prompt_tokens: int
    num_repeated_tokens: int
    num_overcommitted: int
    num_forced_turns: int
    num_strikes: int
    num_failed: int
    num_quarantined: int
    state_to_slots: dict[str, int]
    tier_to_adapters: dict[str, int]
    tier_to_bytes: dict[str, int]
    tier_to_evictions: dict[str, int]
    padding_ratios: dict[str, float]


class EngineMetrics:
    """Prometheus metrics of one engine; names are those of the contracts, seconds and tokens."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        def frequent(name: str, text: str, buckets: tuple[float, ...]) -> FrequentHistogram:
            found = FrequentHistogram(name, text, buckets)
            registry.register(found)
            return found

        self.queue_s = histogram("loraplex_request_queue_seconds", "Wait for a turn, loads not counted.", _FIRST_S)
        self.prefill_s = histogram("loraplex_request_prefill_seconds", "Turn to first token.", _FIRST_S)
        self.ttft_s = histogram("loraplex_time_to_first_token_seconds", "Arrival to first token.", _FIRST_S)
        self.inter_token_s = frequent("loraplex_inter_token_seconds", "Gap between tokens of a request.", _GAP_S)
        self.request_s = histogram("loraplex_request_seconds", "Arrival to last token.", _WHOLE_S)
        self.step_s = frequent("loraplex_step_seconds", "One step: plan, execute, update.", _SHORT_S)
        self.step_host_s = frequent(
            "loraplex_step_host_seconds", "Part of a step beside the model: plan, tensors, update.", _HOST_S
        )
        self.step_tokens = frequent(
            "loraplex_step_tokens", "Tokens in a step.", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
        )
        self.step_requests = frequent(
            "loraplex_step_requests",
            "Requests in a step, of adapters and of the base.",
            (1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
        )
        self.step_adapters = frequent(
            "loraplex_step_adapters", "Distinct adapter digests in a step.", (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
        )
        self.loads = counter("loraplex_adapter_loads_total", "Adapter loads.", "result", "stage")
        self.load_s = histogram("loraplex_adapter_load_seconds", "Seconds of a load.", _SHORT_S, "stage")

        self._invalid_outputs = counter(
            "loraplex_invalid_outputs_total", "Requests whose logits were not finite, by what is to blame.", "cause"
        )

    def count_invalid_output(self, cause: str) -> None:
        """Count a request whose logits were not finite."""
        self._invalid_outputs.labels(cause).inc()

    def watch(self, read: Callable[[], EngineSnapshot]) -> None:
        """Answer scrapes with the engine's own counts beside the observed ones."""
        self.registry.register(_SnapshotCollector(read))

    def to_text(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self.registry)


class FrequentHistogram(Collector):
    """A histogram for what every step observes: values are kept as they come and counted when somebody looks."""

    _MAX_FRESH = 512

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, buckets
        self._counts: Tally[int] = Tally()
        self._sum = 0.0
        self._fresh: list[float] = []

    def observe(self, value: float) -> None:
        """Count one value."""
        self._fresh.append(value)
        if len(self._fresh) >= self._MAX_FRESH:
            self._count()

    def observe_all(self, values: list[float]) -> None:
        """Count several values."""
        self._fresh += values
        if len(self._fresh) >= self._MAX_FRESH:
            self._count()

    def collect(self) -> Iterable[Metric]:
        """As Prometheus wants it: how many values are at most each bound."""
        self._count()
        totals = accumulate(self._counts[index] for index in range(len(self._bounds) + 1))
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, totals, strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)

    def _count(self) -> None:
        self._counts.update([bisect_left(self._bounds, value) for value in self._fresh])
        self._sum += sum(self._fresh)
        self._fresh.clear()


class _SnapshotCollector(Collector):
    def __init__(self, read: Callable[[], EngineSnapshot]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        now = self._read()
        yield _gauge("loraplex_kv_cache_usage_ratio", "Held KV blocks over all blocks.", now.kv_usage_ratio)
        yield _gauge("loraplex_requests_waiting", "Requests in the queue.", now.num_waiting)
        yield _gauge("loraplex_requests_running", "Requests that take part in steps.", now.num_running)
        yield _counter("loraplex_preemptions", "Requests that lost their blocks and start over.", now.num_preemptions)
        yield _counter(
            "loraplex_fair_yields", "Requests that gave their place to a tenant below its share.", now.num_yields
        )
        yield _counter("loraplex_sampled_tokens", "Tokens sampled, all requests.", now.num_sampled)
        yield _counter("loraplex_base_gemm_calls", "Base linears of the layers, one per group.", now.num_base_gemms)
        yield _counter("loraplex_prefix_cache_queries", "Prompt tokens looked up.", now.num_prefix_queries)
        yield _counter("loraplex_prefix_cache_hits", "Prompt tokens found.", now.num_prefix_hits)
        yield _counter("loraplex_prompt_tokens", "Prompt tokens of requests that started.", now.num_prompt_tokens)
        yield _counter(
            "loraplex_prompt_tokens_repeated", "Those that a prefix cache without limit had.", now.num_repeated_tokens
        )
        yield _gauge(
            "loraplex_adapter_slots_overcommitted", "Adapters wanted of late beyond the slots.", now.num_overcommitted
        )
        yield _counter("loraplex_adapter_turns_forced", "Slots that others waited for.", now.num_forced_turns)
        yield _counter("loraplex_adapter_strikes", "Prompts held against adapters.", now.num_strikes)
        yield _gauge("loraplex_adapters_failed", "Adapters whose last load failed.", now.num_failed)
        yield _gauge("loraplex_adapters_quarantined", "Adapters not served here any more.", now.num_quarantined)
        slots = GaugeMetricFamily("loraplex_adapter_slots", "Adapter slots by state.", labels=["state"])
        resident = GaugeMetricFamily("loraplex_adapters_resident", "Adapters by tier.", labels=["tier"])
        evictions = CounterMetricFamily("loraplex_adapter_evictions", "Adapters pushed out.", labels=["tier"])
        held = GaugeMetricFamily("loraplex_adapter_bytes", "Bytes of adapters by tier.", labels=["tier"])
        padding = GaugeMetricFamily("loraplex_lora_padding_ratio", "LoRA work and memory for nothing.", labels=["of"])
        for family, label_to_value in (
            (slots, now.state_to_slots),
            (resident, now.tier_to_adapters),
            (held, now.tier_to_bytes),
            (evictions, now.tier_to_evictions),
            (padding, now.padding_ratios),
        ):
            for label, value in label_to_value.items():
                family.add_metric([label], value)
            yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
