"""What the gate lets through: limits on the differences, from what the engine's dtype costs the base alone."""

from __future__ import annotations

from typing import NamedTuple

from loraplex_engine.parity.job import Difference, ParityDone
from loraplex_registry.peft.parity import ParityResult


class _Allowance(NamedTuple):
    """A limit: `base` times the base's own difference and `effect` times what the adapter changes, at least `floor`.

    An adapter that changes much brings numbers of other sizes with it, which the dtype rounds more coarsely. One that
    changes less than the dtype costs anyway cannot be judged, and does no harm.
    """

    base: float
    effect: float
    floor: float

    def limit(self, base: float, effect: float) -> float:
        """The limit for a measured difference of the base and a measured effect."""
        return max(self.floor, self.base * base + self.effect * effect)


# measured on good and broken adapters of every kind; docs/exactness.md has the figures
_LOGIT = {"float32": _Allowance(4.0, 1e-4, 1e-3), "bfloat16": _Allowance(3.0, 0.25, 0.1)}
_RMS = {"float32": _Allowance(4.0, 1e-4, 1e-4), "bfloat16": _Allowance(2.0, 0.045, 0.02)}
_KL = {"float32": _Allowance(10.0, 1e-6, 1e-6), "bfloat16": _Allowance(16.0, 0.15, 0.01)}

# of |gain - 1|: always, and for each time that the dtype's own noise is as large as the effect
_GAIN = {"float32": (0.01, 0.25), "bfloat16": (0.06, 0.25)}
_MAX_GAIN_LIMIT = 1e6


def judge(done: ParityDone, base: Difference, dtype: str, num_prompts: int) -> ParityResult:
    """Put limits to what was measured.

    Args:
        done: the adapter against its reference.
        base: the base against its own, on the same prompts.
        dtype: the engine's.
        num_prompts: of the measurement.
    """
    own, effect = done.adapter, done.effect
    return ParityResult(
        dtype=dtype,
        num_prompts=num_prompts,
        num_positions=done.num_positions,
        max_logit_difference=own.largest,
        rms_difference=own.rms,
        max_kl=own.max_kl,
        base_logit_difference=base.largest,
        base_rms_difference=base.rms,
        base_kl=base.max_kl,
        effect_rms=effect.rms,
        logit_limit=_LOGIT[dtype].limit(base.largest, effect.largest),
        rms_limit=_RMS[dtype].limit(base.rms, effect.rms),
        kl_limit=_KL[dtype].limit(base.max_kl, effect.max_kl),
        gain=done.gain,
        gain_limit=_limit_gain(dtype, base.rms, effect.rms),
        is_finite=own.is_finite,
    )


def _limit_gain(dtype: str, noise: float, effect: float) -> float:
    always, relative = _GAIN[dtype]
    return min(_MAX_GAIN_LIMIT, always + relative * noise / effect) if effect > 0 else _MAX_GAIN_LIMIT
