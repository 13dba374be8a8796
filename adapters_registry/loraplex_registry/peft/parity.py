"""What an engine found when it compared an adapter through its slots with the base plus merged deltas. Pure data."""

from __future__ import annotations

import msgspec


class ParityResult(msgspec.Struct, frozen=True, kw_only=True):
    """A measured difference over all positions of a few golden prompts; logits are those of the whole vocabulary.

    The reference is float32: each weight of the base with its merged delta. `max_logit_difference` is absolute and
    `max_kl` in nats, KL(reference, engine). The `base_` twins are the same without the adapter: what the engine's dtype
    costs by itself. `rms_difference` is the root of the mean square over all logits, and `effect_rms` the same of what
    the adapter changes at all; `rms_limit` None: not judged. The limits follow from them and were chosen by the engine
    that measured.
    """

    dtype: str
    num_prompts: int
    num_positions: int
    max_logit_difference: float
    max_kl: float
    base_logit_difference: float
    base_kl: float
    logit_limit: float
    kl_limit: float
    is_finite: bool = True
    rms_difference: float = 0.0
    base_rms_difference: float = 0.0
    effect_rms: float = 0.0
    rms_limit: float | None = None
    gain: float = 1.0
    """How much of what the adapter should change was changed: 0 nothing, 2 twice as much."""
    gain_limit: float | None = None
    """How far `gain` may be from 1; None: not judged."""
    weights_digest: str = ""
    """Of the base's weights that the engine had; empty: it did not say."""

    @property
    def is_within(self) -> bool:
        """Whether the adapter answers as its files say."""
        is_near = self.rms_limit is None or self.rms_difference <= self.rms_limit
        is_whole = self.gain_limit is None or abs(self.gain - 1.0) <= self.gain_limit
        are_near = self.max_logit_difference <= self.logit_limit and self.max_kl <= self.kl_limit
        return self.is_finite and is_near and is_whole and are_near
