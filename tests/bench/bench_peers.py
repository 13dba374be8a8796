"""The engine beside vLLM on one machine: `python tests/bench/bench_peers.py --vllm PATH/bin/vllm`, about 8 minutes.

Same base in bfloat16, same prompts and lengths, same client, one server at work at a time, in a shuffled order within
each round; medians over the rounds, of ratios too. vLLM serves the base only, its fastest form; with --with-adapters it
is started once more with eight adapters, which takes some minutes longer. Without --vllm only our own figures are
taken.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_lora import MIXED
from http_load import Outcome, Target, Workload, run_load
from report import Report, build_parser, follow, parse_options
from setting import open_base

from loraplex.bench.text import Text, read_vocabulary
from loraplex.client.upload import list_files
from loraplex_registry.wire.identity import Identity, TokenSigner
from platforms import LivePlatform, running_platform
from support import free_port

_SAMPLED = {"temperature": 0.8, "top_p": 0.95, "logprobs": 5}
_SHORT = Workload(num_requests=64, concurrency=16, prompt_len=128, max_tokens=64)
_PREFIX = Workload(num_requests=48, concurrency=8, prompt_len=32, max_tokens=32, prefix_len=1000)
_TINY_SHORT = Workload(num_requests=4, concurrency=4, prompt_len=8, max_tokens=4)
_TINY_PREFIX = Workload(num_requests=4, concurrency=2, prompt_len=8, max_tokens=4, prefix_len=64)
_VLLM_START_S, _STOP_S = 300.0, 60.0
_VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_TARGET_DEVICE": "cpu",
}


@dataclass(frozen=True, eq=False)
class Peer:
    """Another server: it stands still while ours is measured, as some look for work without a rest."""

    url: str
    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """Stop all of its processes where they are."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self.process.pid, signal.SIGCONT)


@dataclass(frozen=True)
class Case:
    """One workload on one server; `second` names the case that follows over the same prefix."""

    name: str
    target: Target
    work: Workload
    second: str | None = None
    peer: Peer | None = None
    """The server, where it is not ours."""


def main() -> int:
    """Measure and print; returns 1 where a target is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--vllm", help="vLLM's command, of a CPU build in an environment of its own")
    parser.add_argument("--with-adapters", action="store_true", help="measure vLLM with eight adapters, too")
    parser.add_argument("--rounds", type=int, default=3)
    options = parse_options(parser)
    report = Report("peers", options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = open_base(options.base, folder, is_tiny=options.quick)
        adapters = [recipe.write(folder / f"a{i}", base, seed=i) for i, recipe in enumerate(MIXED)]
        flags = ("--base", str(base), "--max-num-seqs", "16", "--max-loras", "8")
        with running_platform(folder / "data", *flags) as platform:
            engine, gateway = _publish(platform, adapters)
            served = _running_vllm(Path(options.vllm), base, ()) if options.vllm else nullcontext(None)
            with served as peer:
                cases = _list_cases(engine, gateway, peer, is_quick=options.quick)
                outcomes = _run(cases, read_vocabulary(base), 1 if options.quick else options.rounds)
        if options.vllm and options.with_adapters:
            with _running_vllm(Path(options.vllm), base, adapters) as peer:
                outcomes |= _run(_list_adapter_cases(peer, len(adapters)), read_vocabulary(base), 1)
    _print(report, outcomes)
    _judge(report, outcomes)
    return report.close()


def _publish(platform: LivePlatform, adapters: Sequence[Path]) -> tuple[Target, Target]:
    """Give each adapter a team; returns the platform at the engine's port and at the gateway's, adapters as models."""
    names, digests, keys = [], [], []
    with platform.management() as client:
        for index, folder in enumerate(adapters):
            name = f"team-{index}"
            client.create_tenant(name)
            keys.append(client.create_key(name, "bench", scopes=["infer"]).key or "")
            digests.append(client.push(name, "default", list_files(folder), lambda _: None, promote="always").digest)
            names.append(name)
        (engine,) = client.list_fleet()
    signer = TokenSigner((platform.data_dir / "signing.pem").read_bytes())
    tokens = tuple(_sign(signer, name) for name in names)
    return (
        Target("engine", engine.url, tuple(digests), tokens),
        Target("gateway", platform.url, tuple(names), tuple(keys)),
    )


def _sign(signer: TokenSigner, tenant: str) -> str:
    identity = Identity(
        role="tenant",
        tenant_id=f"id-{tenant}",
        tenant=tenant,
        scopes=("infer",),
        key_id="bench",
        actor="bench",
        request_id="req_bench",
        target_tenant_id=f"id-{tenant}",
        target_tenant=tenant,
    )
    return signer.sign(identity, "engine", ttl_s=24 * 3600)


def _list_cases(engine: Target, gateway: Target, peer: Peer | None, *, is_quick: bool) -> list[Case]:
    short, prefix = (_TINY_SHORT, _TINY_PREFIX) if is_quick else (_SHORT, _PREFIX)
    base_name = _base_name(engine)
    base = replace(engine, models=(base_name,), keys=engine.keys[:1])
    cases = [
        Case("base", base, short),
        Case("eight adapters", engine, short),
        Case("base, sampled", base, replace(short, extra=_SAMPLED)),
        Case("base, gateway", replace(gateway, models=(base_name,), keys=gateway.keys[:1]), short),
        Case("eight adapters, gateway", gateway, short),
        Case("prefix, base", base, prefix, second="prefix again, base"),
        Case("prefix, eight adapters", engine, prefix, second="prefix again, eight adapters"),
    ]
    if peer is not None:
        target = Target("vLLM", peer.url, ("base",))
        cases += [Case("vLLM, base", target, short, peer=peer), Case("vLLM, prefix, base", target, prefix, peer=peer)]
    return cases


def _list_adapter_cases(peer: Peer, num_adapters: int) -> list[Case]:
    target = Target("vLLM", peer.url, tuple(f"a{index}" for index in range(num_adapters)))
    return [
        Case("vLLM, eight adapters", target, replace(_SHORT, num_requests=32), peer=peer),
        Case("vLLM, prefix, eight adapters", target, replace(_PREFIX, num_requests=16), peer=peer),
    ]


def _base_name(engine: Target) -> str:
    headers = {"authorization": f"Bearer {engine.keys[0]}"}
    answer = httpx.get(f"{engine.url}/v1/models", headers=headers, trust_env=False, timeout=60).raise_for_status()
    return str(answer.json()["data"][0]["id"])


def _run(cases: Sequence[Case], words: Text, num_rounds: int) -> dict[str, list[Outcome]]:
    """All cases of every round in a shuffled order, after each server has answered once."""
    rng = random.Random(0)
    peers = {case.peer for case in cases if case.peer is not None}
    for case in {case.target.name: case for case in cases}.values():
        run_load(case.target, replace(case.work, num_requests=16), words, seed=10_000)
    outcomes: dict[str, list[Outcome]] = {}
    turns = [(seed, case) for seed in range(num_rounds) for case in rng.sample(cases, len(cases))]
    for seed, case in follow(turns, "cases"):
        # other tokens in every round, and where one server is asked the same again, so that no cache helps
        own = 100 * seed + case.work.is_sampled
        for peer in peers:
            (peer.resume if peer is case.peer else peer.pause)()
        outcomes.setdefault(case.name, []).append(run_load(case.target, case.work, words, own))
        if case.second is not None:
            again = run_load(case.target, case.work, words, own + 50, prefix_seed=own)
            outcomes.setdefault(case.second, []).append(again)
    for peer in peers:
        peer.resume()
    return outcomes


def _read(outcome: Outcome, figure: str) -> float:
    name, _, percentile = figure.partition(" p")
    if not percentile:
        return outcome.tokens_per_s
    return (outcome.first_ms if name == "TTFT" else outcome.gap_ms)(int(percentile))


def _median(outcomes: dict[str, list[Outcome]], name: str, figure: str) -> float:
    return statistics.median(_read(outcome, figure) for outcome in outcomes[name])


_FIGURES = ("tokens/s", "TTFT p50", "TTFT p95", "gap p50", "gap p95", "gap p99")


def _print(report: Report, outcomes: dict[str, list[Outcome]]) -> None:
    rows = [
        [name, *(round(_median(outcomes, name, figure), 1) for figure in _FIGURES), sum(len(o.errors) for o in found)]
        for name, found in outcomes.items()
    ]
    report.table(["server and workload (ms)", *_FIGURES, "errors"], sorted(rows))
    for found in outcomes.values():
        for outcome in found:
            for error in outcome.errors[:1]:
                print(f"  error: {error[:300]}")


def _judge(report: Report, outcomes: dict[str, list[Outcome]]) -> None:
    def ratio(name: str, other: str, figure: str = "tokens/s") -> float:
        if len(outcomes[name]) != len(outcomes[other]):
            return _median(outcomes, name, figure) / _median(outcomes, other, figure)
        # round by round, since the machine is not as fast in each
        pairs = zip(outcomes[name], outcomes[other], strict=True)
        return statistics.median(_read(one, figure) / _read(two, figure) for one, two in pairs)

    report.check("errors", sum(len(o.errors) for found in outcomes.values() for o in found), at_most=0)
    report.check("gateway over engine, base", ratio("base, gateway", "base"), at_least=0.92)
    report.check("gateway over engine, adapters", ratio("eight adapters, gateway", "eight adapters"), at_least=0.92)
    report.check("sampled over greedy", ratio("base, sampled", "base"), at_least=0.93)
    cold = _median(outcomes, "prefix, eight adapters", "tokens/s")
    report.check("prefix, adapters, cold, tokens/s", cold, at_least=150)
    again = ratio("prefix again, eight adapters", "prefix again, base")
    report.check("prefix again, adapters over base", again, at_least=0.7)
    if "vLLM, base" not in outcomes:
        return
    report.check("base over vLLM", ratio("base", "vLLM, base"), at_least=1.3)
    report.check("adapters over vLLM's base", ratio("eight adapters", "vLLM, base"), at_least=0.95)
    report.check("prefix, base over vLLM", ratio("prefix, base", "vLLM, prefix, base"), at_least=1.5)
    for figure in ("TTFT p95", "gap p95"):
        report.check(f"{figure}, base over vLLM", ratio("base", "vLLM, base", figure), at_most=1)
        against = ratio("prefix, base", "vLLM, prefix, base", figure)
        report.check(f"{figure}, prefix, base over vLLM", against, at_most=1)
    if "vLLM, eight adapters" not in outcomes:
        return
    for ours, theirs in (
        ("eight adapters", "vLLM, eight adapters"),
        ("prefix, eight adapters", "vLLM, prefix, eight adapters"),
    ):
        report.check(f"{ours} over vLLM's", ratio(ours, theirs), at_least=1)
        for figure in ("TTFT p95", "gap p95"):
            report.check(f"{figure}, {ours} over vLLM's", ratio(ours, theirs, figure), at_most=1)


@contextmanager
def _running_vllm(command: Path, base: Path, adapters: Sequence[Path]) -> Iterator[Peer]:
    """Start vLLM on the base, with adapters `a0`, `a1`, ... where there are any."""
    port = free_port()
    argv = [str(command), "serve", str(base), "--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16"]
    argv += ["--max-num-batched-tokens", "2048", "--enable-prefix-caching"]
    if adapters:
        argv += ["--enable-lora", "--max-loras", "8", "--max-lora-rank", "64", "--lora-modules"]
        argv += [f"a{index}={folder}" for index, folder in enumerate(adapters)]
    environ = os.environ | _VLLM_ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    runtime = command.parent.parent / "lib" / "libiomp5.so"
    if runtime.exists():
        environ["LD_PRELOAD"] = str(runtime)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_healthy(process, f"http://127.0.0.1:{port}")
            yield Peer(f"http://127.0.0.1:{port}", process)
        except RuntimeError:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _VLLM_START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError("vLLM did not start")


if __name__ == "__main__":
    sys.exit(main())
