"""`make fuzz`: every target of `fuzz_targets` for its share of FUZZ_S seconds, each in a process of its own.

    python tests/fuzz/run.py --seconds 900             all targets
    python tests/fuzz/run.py --only header,sse         some
    python tests/fuzz/run.py --try header FILE         what one input does

With atheris the search is led by coverage; without it inputs are mutations of good ones. What breaks a promise is kept
in `.fuzz/crashes`; put it into `tests/fuzz/corpus/NAME` with the repair, where `make test` tries it for ever.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import resource
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS))
WORK = Path(os.environ.get("LORAPLEX_FUZZ_DIR", ROOT / ".fuzz"))
_MEMORY_BYTES = 4 << 30
_GRACE_S = 60


def main() -> int:
    """Do what the command line says; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FUZZ_S", "900")))
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--try", dest="trial", nargs=2, metavar=("NAME", "FILE"))
    options = parser.parse_args()
    if options.trial:
        from fuzz_targets import TARGETS

        TARGETS[options.trial[0]].try_once(Path(options.trial[1]).read_bytes())
        return 0
    if options.one:
        return _search(options.one, options.seconds)
    return _search_all(options.only.split(",") if options.only else _list_names(), options.seconds, options.jobs)


def _list_names() -> list[str]:
    listed = subprocess.run(
        [sys.executable, "-c", "import fuzz_targets; print(*fuzz_targets.TARGETS)"],
        cwd=TESTS, env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return listed.stdout.split()


def _search_all(names: list[str], seconds: float, jobs: int) -> int:
    share_s = seconds * jobs / len(names)
    WORK.mkdir(parents=True, exist_ok=True)
    print(f"{len(names)} targets, {share_s:.0f} s each, {jobs} at a time, {_describe_engine()}", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda name: _run_one(name, share_s), names))
    broken = [name for name, code in zip(names, results, strict=True) if code]
    print(
        f"{len(names) - len(broken)} of {len(names)} targets kept their promises"
        + (f"; broken: {', '.join(broken)}" if broken else "")
    )
    return 1 if broken else 0


def _run_one(name: str, seconds: float) -> int:
    log = WORK / f"{name}.log"
    argv = [sys.executable, __file__, "--one", name, "--seconds", str(seconds)]
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                argv, stdout=output, stderr=subprocess.STDOUT, timeout=seconds + _GRACE_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    print(f"{'ok' if code == 0 else 'BROKEN':>7} {name}: {last[0][:160] if last else ''}", flush=True)
    return code


def _describe_engine() -> str:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return "by mutations; led by coverage with `pip install 'atheris>=3'` (Linux)"
    return "led by coverage"


def _search(name: str, seconds: float) -> int:
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        import atheris
    except ImportError:
        return _search_by_mutations(name, seconds)
    with atheris.instrument_imports(include=["loraplex", "loraplex_engine", "loraplex_registry", "multipart", "jwt"]):
        from fuzz_targets import TARGETS
    from fuzz_target import MAX_LEN

    target = TARGETS[name]
    corpus = WORK / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.list_known():
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    words = WORK / f"{name}.dict"
    quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    crashes = WORK / "crashes"
    crashes.mkdir(exist_ok=True)
    argv = [sys.argv[0], f"-max_total_time={max(1, int(seconds))}", f"-max_len={MAX_LEN}", f"-dict={words}"]
    argv += [
        "-timeout=30",
        "-rss_limit_mb=0",
        "-print_final_stats=1",
        f"-artifact_prefix={crashes}/{name}-",
        str(corpus),
    ]
    atheris.Setup(argv, target.try_once)
    atheris.Fuzz()
    return 0


def _search_by_mutations(name: str, seconds: float) -> int:
    from fuzz_target import mutate
    from fuzz_targets import TARGETS

    target = TARGETS[name]
    known, draw, num_tries, end_at = target.list_known(), random.Random(0), 0, time.monotonic() + seconds
    while time.monotonic() < end_at:
        data = mutate(known, target.words, draw)
        try:
            target.try_once(data)
        except BaseException:
            place = WORK / "crashes" / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            traceback.print_exc()
            print(f"{place}: {data[:200]!r}")
            return 1
        num_tries += 1
    print(f"{num_tries} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
