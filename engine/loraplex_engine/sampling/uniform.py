"""Counter-based random numbers: a hash of (seed, choice, position), so nothing that happened before can change one."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def stream(seed: int, choice: int) -> int:
    """The numbers of one choice of a seed: what `uniform` is to be given."""
    return _mix(_mix(seed) ^ (choice & _MASK))


def uniform(stream_id: int, position: int) -> float:
    """The number of a stream at a position, in [0, 1) with 53 bits: the last of three rounds of SplitMix64."""
    return (_mix(stream_id ^ (position & _MASK)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
