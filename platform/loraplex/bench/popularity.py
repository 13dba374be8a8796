"""Which model each request asks for: how often each of several adapters is called."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from loraplex.bench.errors import BenchError

KINDS = ("identical", "uniform", "skewed", "distinct", "zipf:1.5")
_ZIPF = re.compile(r"zipf(?::(\d{1,2}(?:\.\d{1,4})?))?")
_ZIPF_EXPONENT = 1.5
_SKEW = 3


def build_chooser(kind: str, models: Sequence[str], rng: random.Random) -> Callable[[int], str]:
    """Return what names the model of the i-th request.

    Semantics: identical: the first; distinct: each in turn; uniform: drawn evenly; skewed: each a third as often as the
    one before; zipf:S: the k-th with weight 1 / k^S.

    Raises:
        BenchError: `kind` is none of them.
    """
    if kind == "identical":
        return lambda _: models[0]
    if kind == "distinct":
        return lambda index: models[index % len(models)]
    if kind == "uniform":
        return lambda _: rng.choice(models)
    if kind == "skewed":
        weights = [float(_SKEW) ** -place for place in range(len(models))]
    elif found := _ZIPF.fullmatch(kind):
        weights = [place ** -float(found[1] or _ZIPF_EXPONENT) for place in range(1, len(models) + 1)]
    else:
        raise BenchError(f"There is no popularity {kind!r}: {', '.join(KINDS)}.", param="popularity")
    return lambda _: rng.choices(models, weights)[0]
