"""Moves the bounds of numbers that are multiples of something to the multiples next to them.

Nothing is allowed or forbidden by it. The grammar library writes 0.1 between 0.05 and 0.15 as 0.10 only, which as a
multiple it does not write, and would find nothing.
"""

from __future__ import annotations

import math
from fractions import Fraction

from loraplex_engine.server.constraint.node import Schema

_BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))


def move_bounds(schema: Schema) -> None:
    """Change the bounds of one checked schema in place."""
    if "multipleOf" not in schema:
        return
    step = _read(schema["multipleOf"])
    for name, exclusive, sign in _BOUNDS:
        inner, outer = schema.pop(name, None), schema.pop(exclusive, None)
        if isinstance(outer, bool):
            # draft 4 says by it how the other bound is meant
            inner, outer = (None, inner) if outer else (inner, None)
        least = [math.ceil(sign * _read(inner) / step)] if inner is not None else []
        least += [math.floor(sign * _read(outer) / step) + 1] if outer is not None else []
        if least:
            bound = sign * max(least) * step
            schema[name] = bound.numerator if bound.denominator == 1 else float(bound)


def _read(number: float) -> Fraction:
    """Return the number that the digits say."""
    return Fraction(repr(number))
