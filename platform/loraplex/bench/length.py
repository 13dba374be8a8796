"""How many tokens prompts and answers have: always the same, uniform between two, or lognormal about a median."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from loraplex.bench.errors import BenchError

_FIXED = re.compile(r"(?:fixed:)?(\d{1,7})")
_UNIFORM = re.compile(r"uniform:(\d{1,7})-(\d{1,7})")
_LOGNORMAL = re.compile(r"lognormal:(\d{1,7}),(\d{1,2}(?:\.\d{1,4})?)(?:,(\d{1,7}))?")
_MAX_TO_MEDIAN = 10


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers from `low` to `high`; lognormal about `median` where `sigma` is above 0."""

    low: int
    high: int
    median: int = 0
    sigma: float = 0.0

    def __str__(self) -> str:
        if self.sigma:
            return f"lognormal:{self.median},{self.sigma:g},{self.high}"
        return f"{self.low}" if self.low == self.high else f"uniform:{self.low}-{self.high}"

    def draw(self, rng: random.Random) -> int:
        """Return one length; what a lognormal puts outside `low` to `high` counts as the nearer of them."""
        if self.sigma:
            drawn = round(rng.lognormvariate(math.log(self.median), self.sigma))
            return min(max(drawn, self.low), self.high)
        return rng.randint(self.low, self.high)


def read_lengths(text: str, param: str) -> Lengths:
    """Return the distribution that `text` names: `128`, `uniform:64-256`, `lognormal:MEDIAN,SIGMA[,MAX]`.

    Raises:
        BenchError: It names none.
    """
    if found := _FIXED.fullmatch(text):
        lengths = Lengths(int(found[1]), int(found[1]))
    elif found := _UNIFORM.fullmatch(text):
        lengths = Lengths(int(found[1]), int(found[2]))
    elif found := _LOGNORMAL.fullmatch(text):
        median = int(found[1])
        lengths = Lengths(1, int(found[3] or median * _MAX_TO_MEDIAN), median, float(found[2]))
    else:
        raise BenchError(
            f"{text!r} is no distribution of lengths: 128, uniform:64-256, or lognormal:MEDIAN,SIGMA,MAX as "
            "lognormal:200,0.8,2000.",
            param=param,
        )
    if not 1 <= lengths.low <= lengths.high or (lengths.sigma and not lengths.low <= lengths.median <= lengths.high):
        raise BenchError(f"{text!r} holds lengths below 1, or ends before it begins.", param=param)
    return lengths
