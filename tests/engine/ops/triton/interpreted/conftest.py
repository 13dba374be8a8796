"""The interpreter, with one change: `tl.dot` is a float64 product, rounded once.

Its own product is numpy's, whose float32 sums depend on where a row lies in a tile; and it multiplies the bits of
bfloat16 as if they were integers. Rounded once, a sum does not depend on its order, so that whatever differs between
a row alone and the same row in company was done by the kernel.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, before Triton is imported", allow_module_level=True)

import triton.language as tl
from triton.runtime import interpreter


def _widen(handle: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    with np.errstate(invalid="ignore", over="ignore"):
        product = (_widen(a) @ _widen(b)).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run every eleventh combination of a test that has many, unless `make endure` asks for all: one takes a second.

    No test has eleven values of a parameter, or a multiple, so that each value has its turn.
    """
    if config.getoption("--endure"):
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    items[:] = [item for found in groups.values() for item in (found if len(found) < 5 else found[::11])]


@pytest.fixture(autouse=True)
def _dot_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
