"""The one seam of the base linears: right with and without packing, weight held once, rows probed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from loraplex_engine.ops import linear as linear_module
from loraplex_engine.ops.linear import PackedLinear, can_pack, probe_row_invariance

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(params=["packed", "plain"])
def _form(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(linear_module, "can_pack", lambda _: False)
    elif not can_pack(torch.float32):
        pytest.skip("this machine has no packed linear")


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 130])
@pytest.mark.parametrize(("k", "o"), [(576, 960), (37, 51), (64, 7)])
@pytest.mark.usefixtures("_form")
def test_linear_is_a_product_with_the_transposed_weight(assert_close, dtype, rows, k, o):
    weight, bias, x = torch.randn(o, k).to(dtype), torch.randn(o).to(dtype), torch.randn(rows, k).to(dtype)
    for b in (None, bias):
        y = PackedLinear(weight, b)(x)
        assert y.shape == (rows, o)
        if rows:
            truth = x.double() @ weight.double().T
            assert_close(y, truth if b is None else truth + b.double())


def test_float64_takes_the_plain_form():
    linear, x = PackedLinear(torch.randn(5, 3, dtype=torch.float64)), torch.randn(2, 3, dtype=torch.float64)
    assert not linear.is_packed
    assert linear(x).dtype is torch.float64


@dtypes
def test_a_packed_linear_lets_go_of_the_plain_weight(dtype):
    if not can_pack(dtype):
        pytest.skip("this machine has no packed linear")
    weight = torch.randn(64, 48).to(dtype)
    held = weakref.ref(weight)
    linear = PackedLinear(weight)
    del weight
    gc.collect()
    assert held() is None
    assert linear(torch.ones(1, 48, dtype=dtype)).shape == (1, 64)


def test_the_probe_finds_a_linear_whose_rows_depend_on_their_company():
    class Leaky(PackedLinear):
        def __call__(self, x):
            return super().__call__(x) + (1e-7 if len(x) == 16 else 0)

    assert not probe_row_invariance([PackedLinear(torch.randn(8, 24)), Leaky(torch.randn(9, 24))])


def test_packing_is_off_where_the_private_ops_misbehave(monkeypatch):
    monkeypatch.setattr(linear_module, "_pack", lambda weight: (_ for _ in ()).throw(RuntimeError("no such op")))
    assert can_pack.__wrapped__(torch.float32) is False
    monkeypatch.setattr(linear_module, "_pack", lambda weight: weight + 1)
    monkeypatch.setattr(linear_module, "_apply_packed", torch.nn.functional.linear)
    assert can_pack.__wrapped__(torch.float32) is False
