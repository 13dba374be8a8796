"""Messages about full fine-tunes, and about the LoRAs that they replace."""

from __future__ import annotations

import msgspec

from loraplex_registry.peft.saturation import ModuleSaturation, Saturation
from loraplex_registry.wire.adapter import Target

__all__ = ["Measured", "ModuleSaturation", "Replaced", "Saturation"]


class Replaced(msgspec.Struct, frozen=True):
    """What the alias `live` pointed to before a full fine-tune took its place; nothing if it was not set."""

    targets: tuple[Target, ...]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Which version of a LoRA was measured, and its figures, or in one sentence why there are none."""

    adapter_id: str
    base: str
    version: int
    digest: str
    saturation: Saturation | None = None
    problem: str | None = None
