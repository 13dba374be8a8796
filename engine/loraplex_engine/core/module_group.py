"""How a model's modules are fused: one matrix product and two LoRA launches per group, one slice per module.

The order of slices is the order of columns in the group's output. The groups of a layer come first; `embedding` and
`head` are there once in a model and count as groups of layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LAYER_GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
EMBEDDING_GROUP, HEAD_GROUP = "embedding", "head"
GROUPS: Mapping[str, tuple[str, ...]] = {
    **LAYER_GROUPS,
    EMBEDDING_GROUP: ("embed_tokens",),
    HEAD_GROUP: ("lm_head",),
}
GROUP_NAMES = tuple(GROUPS)
GROUP_INDEX = {group: index for index, group in enumerate(GROUPS)}
MAX_SLICES = max(len(modules) for modules in GROUPS.values())

_MODULE_TO_PLACE = {
    module: (GROUP_INDEX[group], slice_id)
    for group, modules in LAYER_GROUPS.items()
    for slice_id, module in enumerate(modules)
}
_PATH = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")
_OTHER_PLACES = {
    "model.embed_tokens": (0, GROUP_INDEX[EMBEDDING_GROUP], 0),
    "lm_head": (0, GROUP_INDEX[HEAD_GROUP], 0),
}


def find_place(path: str) -> tuple[int, int, int] | None:
    """Layer, group and slice of a module path such as `model.layers.0.self_attn.q_proj`; None if it has no place."""
    if path in _OTHER_PLACES:
        return _OTHER_PLACES[path]
    match = _PATH.fullmatch(path)
    place = _MODULE_TO_PLACE.get(match[2]) if match else None
    return (int(match[1]), *place) if match and place else None
