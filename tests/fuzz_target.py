"""What a fuzz target is: any bytes into one parser, which accepts them or refuses them by an error of its own, in time.

Targets say what they promise; everything else that comes out of them is a crash. `Target.try_once` is one try, timed;
`mutate` makes the next input of a good one, for searches that no coverage leads.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
MAX_LEN = 4096
MAX_CPU_S = 2.0
_Result = TypeVar("_Result")
_WORDS = (
    b"null",
    b"true",
    b"NaN",
    b"-1",
    b"1e999",
    b"9" * 30,
    b"[" * 200,
    b'{"":' * 100,
    b"\\ud800",
    b"\0",
    b"\xff",
    b"\r\n",
)
JSON_WORDS = (
    b'":',
    b'","',
    b"null",
    b"{}",
    b"[]",
    b"1e400",
    b"\\u0000",
    b"\\ud800",
    b"9" * 40,
    b"2999-01-01T00:00:00Z",
)
"""What mutations put into JSON."""
KILLED_BY_LIMIT = (signal.SIGVTALRM, signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)
"""How the kernel ends a task that takes more than it may."""


class SlowError(Exception):
    """An input took longer than any may."""


@dataclass(frozen=True)
class Target:
    """One parser.

    Args:
        name: Of the target, and of its folder in the corpus.
        take: Takes any bytes; what it raises is a crash, but for `refusals`.
        seeds: Good inputs, to begin with.
        refusals: How the parser says no.
        words: What its grammar is made of, beside what the seeds hold.
        max_cpu_s: How long one input may take.
    """

    name: str
    take: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = ()
    words: tuple[bytes, ...] = ()
    max_cpu_s: float = MAX_CPU_S

    def try_once(self, data: bytes) -> None:
        """Feed one input.

        Raises:
            SlowError: It took too long.
            Exception: A crash.
        """
        began_s = time.process_time()
        try:
            self.take(data)
        except self.refusals as error:
            # what is told must be tellable: no half of a character, no page of text
            text = str(error)
            text.encode()
            assert len(text) < 1 << 16, "the refusal is too long"
        took_s = time.process_time() - began_s
        if took_s > self.max_cpu_s:
            raise SlowError(f"{self.name}: {took_s:.1f} s of processor time")

    def list_known(self) -> list[bytes]:
        """Return seeds and what was found before."""
        return [*self.seeds, *(path.read_bytes() for path in sorted((CORPUS / self.name).glob("*")))]


def try_each(reads: Iterable[Callable[[], object]], refusals: tuple[type[Exception], ...]) -> None:
    """Let several readers have the same input, whatever the others say of it."""
    for read in reads:
        try:
            read()
        except refusals as error:
            str(error).encode()


def run_async(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run what is asynchronous to its end."""
    return asyncio.run(work)


def run_forked(work: Callable[[], bytes], contained: Collection[int]) -> bytes | None:
    """Return what `work` returns in a fork of this process, None where a signal of `contained` ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            answer = work()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(answer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -code in contained:
        return None
    assert code == 0, f"the process ended with {code}"
    return answer


def mutate(known: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> bytes:
    """Return a good input with a few places flipped, cut, doubled, or taken from another."""
    data = bytearray(draw.choice(known))
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(data))
        stop = min(len(data), start + draw.choice((0, 1, 1, 4, 30)))
        other = draw.choice(known)
        cut = draw.randint(0, len(other))
        piece = draw.choice(
            (
                b"",
                bytes([draw.randrange(256)]),
                draw.randbytes(draw.randint(1, 8)),
                draw.choice([*words, *_WORDS]),
                bytes(data[start:stop]) * draw.randint(2, 9),
                other[cut : cut + draw.randint(1, 64)],
                str(draw.choice((0, -1, 255, 2**31, 2**63, 2**64, 10**40))).encode(),
            )
        )
        data[start:stop] = piece
    return bytes(data[: draw.randint(0, len(data))] if draw.random() < 0.1 else data)[:MAX_LEN]
