"""Different adapters share a forward pass: seen in the metrics, and by a profiler that knows nothing of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import EngineWorld, text_ids
from loraplex_engine.bases.pull import pull
from support import write_adapter

NUM_LAYERS, LINEARS_PER_LAYER = 2, 4


class Shared:
    """An engine on the tiny base with six adapters of ranks 1 to 32."""

    def __init__(self, base: Path, tmp: Path) -> None:
        self.world = EngineWorld(base, tmp / "cache", cpu_threads=1)
        ranks = (1, 4, 8, 16, 24, 32)
        self.digests = [
            self.world.put(write_adapter(tmp / f"a{rank}", base, rank=rank, targets=targets, seed=rank))
            for rank, targets in zip(ranks, [["q_proj"], ["q_proj", "v_proj"], ["down_proj"]] * 2, strict=True)
        ]

    def sample(self, name: str, **labels: str) -> float:
        value = self.world.engine.metrics.registry.get_sample_value(name, labels)
        assert value is not None, name
        return value

    def decode_together(self, digests: list[str | None]) -> None:
        """Bring one request per digest to the point where each decodes."""
        requests = [self.world.request([5, 6, 7, index + 8], d, 40) for index, d in enumerate(digests)]
        for request in requests:
            self.world.engine.add(request)
        while any(not request.output_ids for request in requests):
            self.world.engine.step()

    def count_linears(self) -> int:
        """Linear operators in one step, as torch's profiler counts them."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.world.engine.step()
        names = ("loraplex::packed_linear", "mkldnn::_linear_pointwise", "aten::linear")
        return sum(event.count for event in profile.key_averages() if event.key in names)

    def stop(self) -> None:
        for request in list(self.world.engine.scheduler.running):
            self.world.engine.abort(request.request_id)


@pytest.fixture(scope="module")
def shared(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    tmp = tmp_path_factory.mktemp("one-batch")
    return Shared(pull(str(tiny_llama), tmp / "bases"), tmp)


def test_steps_hold_many_digests_and_call_each_base_linear_once(shared: Shared) -> None:
    world = shared.world
    world.run([world.request([3, 4, 5 + i], digest, 12) for i, digest in enumerate([None, *shared.digests])])
    steps = shared.sample("loraplex_step_adapters_count")
    assert steps - shared.sample("loraplex_step_adapters_bucket", le="4.0") >= 8, (
        "no eight steps with five or six digests"
    )
    assert steps - shared.sample("loraplex_step_requests_bucket", le="6.0") > 0, "the base's row counts too"
    assert shared.sample("loraplex_base_gemm_calls_total") == NUM_LAYERS * LINEARS_PER_LAYER * steps


@pytest.mark.parametrize("num_adapters", [0, 1, 3, 6])
def test_profiler_sees_the_same_linears_whatever_the_mix(shared: Shared, num_adapters: int) -> None:
    shared.decode_together([*([None] * (6 - num_adapters)), *shared.digests[:num_adapters]])
    assert shared.count_linears() == NUM_LAYERS * LINEARS_PER_LAYER + 1
    shared.stop()


def test_adapter_that_overflows_ends_its_own_request_alone(shared: Shared, tiny_llama: Path, tmp_path: Path) -> None:
    world = shared.world
    huge = world.put(write_adapter(tmp_path / "huge", tiny_llama, std=1e30, seed=9))
    prompts = {None: [3, 4, 5], shared.digests[1]: [6, 7, 8], huge: [3, 4, 5]}
    alone = {d: text_ids(next(iter(world.run([world.request(ids, d, 6)]).values()))) for d, ids in prompts.items()}
    requests = {digest: world.request(ids, digest, 6) for digest, ids in prompts.items()}
    events = world.run(list(requests.values()))
    last = {digest: events[request.request_id][-1] for digest, request in requests.items()}
    assert last[huge].error is not None
    assert last[huge].error.code == "adapter_output_invalid"
    for digest in (None, shared.digests[1]):
        assert last[digest].error is None
        assert text_ids(events[requests[digest].request_id]) == alone[digest]
