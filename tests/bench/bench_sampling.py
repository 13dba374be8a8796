"""Times the choice of a step's tokens, as the runner asks for it, at the vocabulary of a small real base. Run by path.

    python tests/bench/bench_sampling.py [--dtype bfloat16] [--threads 2] [--rows 16] [--repeats 200]

All kinds are timed in turn within each repeat and the medians are printed, so that a noisy moment hits all alike. The
logits are a random model's, with some hundred likely tokens a row.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from loraplex_engine.core.request import Request
from loraplex_engine.ops.native.build import native_status
from loraplex_engine.sampling.sampler import Sampler
from loraplex_engine.wire.messages import SamplingParams

VOCAB = 49152
PROMPT, OUTPUT = 1000, 200
KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_p 0.95, logprobs 5": {"temperature": 0.8, "top_p": 0.95, "logprobs": 5},
    "top_p 0.95, logprobs 5, penalties": {
        "temperature": 0.8,
        "top_p": 0.95,
        "logprobs": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 50, top_p 0.95, min_p 0.01": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "top_p 0.9999, temperature 2": {"temperature": 2.0, "top_p": 0.9999},
}


def main() -> None:
    """Print the medians of all kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logits = (torch.randn(options.rows, VOCAB) * 2.5).to(getattr(torch, options.dtype))
    sampler, requests = Sampler((2,)), {}
    for name, params in KINDS.items():
        requests[name] = []
        for row in range(options.rows):
            prompt = torch.randint(0, VOCAB, (PROMPT,)).tolist()
            requests[name].append(Request(f"{row}", prompt, SamplingParams(10_000, seed=row, **params)))  # type: ignore[arg-type]
            requests[name][-1].output_ids += torch.randint(0, VOCAB, (OUTPUT,)).tolist()
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    with torch.inference_mode():
        for _ in range(options.repeats + 1):
            for name, batch in requests.items():
                begin = time.perf_counter()
                samples = sampler.sample(logits, batch)
                times[name].append((time.perf_counter() - begin) * 1e3)
                for request in batch:
                    request.output_ids.append(samples.token_ids[request.request_id])
    print(native_status())
    print(f"{options.rows} rows of {VOCAB} logits, {options.dtype}, {options.threads} threads, median ms")
    for name, values in times.items():
        print(f"  {name:36} {statistics.median(values[1:]):8.3f}")


if __name__ == "__main__":
    main()
