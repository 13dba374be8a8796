"""`make fuzz`: every target of `fuzz_targets` for its share of FUZZ_S seconds, each in a process of its own.

    python tests/fuzz/run.py --seconds 900             all targets
    python tests/fuzz/run.py --only path,pools         some
    python tests/fuzz/run.py --try path FILE           what one input does

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
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS))
WORK = Path(os.environ.get("LORAPLEX_FUZZ_DIR", ROOT / ".fuzz"))
_MEMORY_BYTES = 4 << 30
_GRACE_S = 120
_INSTRUMENTED = ["jwt", "loraplex", "loraplex_engine", "loraplex_registry", "multipart"]


def main() -> int:
    """Do what the command line says; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FUZZ_S", "900")))
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--try", dest="trial", nargs=2, metavar=("NAME", "FILE"))
    options = parser.parse_args()
    if options.trial:
        from fuzz_targets import TARGETS

        TARGETS[options.trial[0]].try_once(Path(options.trial[1]).read_bytes())
        return 0
    logging.disable(logging.CRITICAL)
    return _search_all(options.only.split(",") if options.only else [], options.seconds, options.jobs)


def _search_all(only: list[str], seconds: float, jobs: int) -> int:
    """Import once, then fork for each target."""
    atheris = _import_targets()
    from fuzz_targets import TARGETS

    names = only or list(TARGETS)
    share_s = seconds * jobs / len(names)
    (WORK / "crashes").mkdir(parents=True, exist_ok=True)
    how = "by mutations; led by coverage with `pip install 'atheris>=3'` (Linux)" if atheris is None else "by coverage"
    _say(f"{len(names)} targets, {share_s:.0f} s each, {jobs} at a time, {how}")
    waiting, running, broken = list(names), dict[int, str](), list[str]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[_start(name, share_s, atheris)] = name
        pid, status = os.wait()
        name = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        broken += [name] if code else []
        _say(f"{'BROKEN' if code else 'ok':>7} {name}: {_read_last_line(name)}" + (f" (code {code})" if code else ""))
    _say(f"{len(names) - len(broken)} of {len(names)} targets kept their promises {' '.join(broken)}")
    return 1 if broken else 0


def _import_targets() -> ModuleType | None:
    try:
        import atheris
    except ImportError:
        return None
    with atheris.instrument_imports(include=_INSTRUMENTED):
        import fuzz_targets  # noqa: F401
    found: ModuleType = atheris
    return found


def _start(name: str, seconds: float, atheris: ModuleType | None) -> int:
    """Return the process that searches one target."""
    pid = os.fork()
    if pid:
        return pid
    with (WORK / f"{name}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.alarm(int(seconds) + _GRACE_S)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    code = 1
    try:
        if atheris is None:
            code = _search_by_mutations(name, seconds)
        else:
            _search_by_coverage(name, seconds, atheris)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _search_by_coverage(name: str, seconds: float, atheris: ModuleType) -> None:
    from fuzz_target import MAX_LEN
    from fuzz_targets import TARGETS

    target = TARGETS[name]
    corpus = WORK / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.list_known():
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    words = WORK / f"{name}.dict"
    quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    argv = [sys.argv[0], f"-max_total_time={max(1, int(seconds))}", f"-max_len={MAX_LEN}"]
    # a dictionary without words is an error there
    argv += [f"-dict={words}"] if target.words else []
    argv += ["-timeout=60", "-rss_limit_mb=0", f"-artifact_prefix={WORK}/", str(corpus)]
    atheris.Setup(argv, lambda data: _try_and_keep(target, data))
    # ends the process by itself
    atheris.Fuzz()


def _search_by_mutations(name: str, seconds: float) -> int:
    from fuzz_target import mutate
    from fuzz_targets import TARGETS

    target = TARGETS[name]
    known, draw, num_tries, end_at = target.list_known(), random.Random(0), 0, time.monotonic() + seconds
    while time.monotonic() < end_at:
        data = mutate(known, target.words, draw)
        try:
            _try_and_keep(target, data)
        except BaseException:
            traceback.print_exc()
            return 1
        num_tries += 1
    print(f"{num_tries} inputs")
    return 0


def _try_and_keep(target: Any, data: bytes) -> None:
    """Try an input, and keep the one that breaks the promise."""
    try:
        target.try_once(data)
    except BaseException:
        place = WORK / "crashes" / f"{target.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        place.write_bytes(data)
        print(f"{place}: {data[:200]!r}")
        raise


def _read_last_line(name: str) -> str:
    lines = (WORK / f"{name}.log").read_text(errors="replace").splitlines()
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
