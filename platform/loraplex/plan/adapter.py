"""Adapters of a plan: how many values a LoRA of some rank on some modules has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from loraplex.errors import InvalidRequestError
from loraplex.plan.shape import LAYER_MODULES, OUTER_MODULES, ModelShape

_SETS = {"all": LAYER_MODULES, "all-linear": LAYER_MODULES, "attention": LAYER_MODULES[:4], "mlp": LAYER_MODULES[4:]}
_SHORT = {name.removesuffix("_proj"): name for name in LAYER_MODULES} | {"embed": "embed_tokens", "head": "lm_head"}
MODULE_NAMES = (*_SHORT, *_SHORT.values(), *_SETS)
"""How modules may be named."""
MAX_RANK, MAX_COUNT, MAX_PARAMETERS, MAX_MODULES = 4096, 1_000_000, 1 << 40, 20


class AdapterGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some adapters of one form.

    `modules` are leaf names or short forms (q, k, v, o, gate, up, down, embed, head), or a set: attention, mlp, all.
    `num_parameters` are those of one adapter where they were counted in its file; None: rank and modules tell.
    """

    count: int = 1
    rank: int = 16
    modules: Sequence[str] = ("q", "k", "v", "o")
    num_parameters: int | None = None


def expand_modules(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the modules' leaf names in the order of the forward pass, each once.

    Raises:
        InvalidRequestError: There is none, or one that no adapter can be trained on.
    """
    found: set[str] = set()
    for name in modules:
        if name not in MODULE_NAMES:
            raise InvalidRequestError(
                f"The module {name!r} is not known; known are {', '.join((*_SHORT, *_SETS))}.", param="adapters.modules"
            )
        found |= set(_SETS.get(name, (_SHORT.get(name, name),)))
    if not found:
        raise InvalidRequestError("An adapter changes at least one module.", param="adapters.modules")
    return tuple(name for name in (*LAYER_MODULES, *OUTER_MODULES) if name in found)


def check_group(group: AdapterGroup) -> None:
    """Refuse a group whose numbers make no adapter.

    Raises:
        InvalidRequestError: The message names the field and its range.
    """
    for name, value, most in (
        ("count", group.count, MAX_COUNT),
        ("rank", group.rank, MAX_RANK),
        ("modules", len(group.modules), MAX_MODULES),
        ("num_parameters", 1 if group.num_parameters is None else group.num_parameters, MAX_PARAMETERS),
    ):
        if not 1 <= value <= most:
            what = "number of modules" if name == "modules" else name
            raise InvalidRequestError(
                f"The {what} is {value}, but must be from 1 to {most:,}.", param=f"adapters.{name}"
            )


def count_layer_parameters(group: AdapterGroup, shape: ModelShape) -> int:
    """Values of one adapter in one layer: rank x (input + output features), summed over its modules of a layer."""
    features = shape.module_to_features
    return group.rank * sum(sum(features[name]) for name in expand_modules(group.modules) if name in LAYER_MODULES)


def count_parameters(group: AdapterGroup, shape: ModelShape) -> int:
    """Values of one adapter of the group."""
    if group.num_parameters is not None:
        return group.num_parameters
    features = shape.module_to_features
    outer = sum(sum(features[name]) for name in expand_modules(group.modules) if name in OUTER_MODULES)
    return shape.num_layers * count_layer_parameters(group, shape) + group.rank * outer
