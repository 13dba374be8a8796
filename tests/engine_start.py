"""What an engine that starts finds out by computing is found out once in a process for engines that are alike.

How long steps take, what a step at the limits needs and whether rows depend on their company are facts of a machine, of
shapes and of forms: to find them again for each engine of a test is most of the time that a tiny one takes to start.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from unittest import mock

from loraplex_engine.config import EngineConfig
from loraplex_engine.loop import assembly
from loraplex_engine.loop.base import Base
from loraplex_engine.loop.calibration import calibrate_runner
from loraplex_engine.loop.profile import StepProfile, limit_rows
from loraplex_engine.models.decoder import Decoder
from loraplex_engine.ops.linear import PackedLinear, probe_row_invariance
from loraplex_engine.ops.native.build import native_status
from loraplex_engine.runner import ModelRunner
from loraplex_engine.scheduling.cost import StepCost

T = TypeVar("T")
_profile = assembly._profile
_found: dict[tuple[object, ...], Any] = {}


@contextlib.contextmanager
def find_once() -> Iterator[None]:
    """Let engines that are built within find out what no engine of this process has."""
    with mock.patch.multiple(
        assembly, _profile=_profile_once, calibrate_runner=_calibrate_once, probe_row_invariance=_probe_once
    ):
        yield


def _remember(key: tuple[object, ...], find: Callable[[], T]) -> T:
    if key not in _found:
        _found[key] = find()
    found: T = _found[key]
    return found


def _profile_once(
    config: EngineConfig, base: Base, decoder: Decoder, build_runner: Callable[[Decoder, int], ModelRunner]
) -> StepProfile:
    rows = tuple(limit_rows(config, base.max_model_len))
    key = (base.config, base.dtype, native_status().form, rows, config.block_size, config.step_timeout_s)
    return _remember(("profile", *key), lambda: _profile(config, base, decoder, build_runner))


def _calibrate_once(runner: ModelRunner, num_blocks: int, block_size: int, max_model_len: int) -> StepCost:
    model = runner._model
    key = (model.config, model.dtype, native_status().form, block_size, max_model_len)
    # it learns from the steps of its engine
    return copy.copy(_remember(("cost", *key), lambda: calibrate_runner(runner, num_blocks, block_size, max_model_len)))


def _probe_once(linears: Iterable[PackedLinear]) -> bool:
    known = list(linears)
    key = frozenset((linear.in_features, linear.out_features, linear.dtype, linear.form) for linear in known)
    return _remember(("rows", key), lambda: probe_row_invariance(known))
