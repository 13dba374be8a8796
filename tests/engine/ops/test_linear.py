"""The one seam of the base linears: right in every form, weight held once, rows apart to the bit."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from loraplex_engine.ops import linear as linear_module
from loraplex_engine.ops.linear import (
    ONEDNN,
    OWN,
    PLAIN,
    LinearForm,
    PackedLinear,
    fastest_form,
    has_onednn,
    probe_row_invariance,
)
from loraplex_engine.ops.native.build import native_status

pytestmark = pytest.mark.pairs
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
NUM_ROWS = (*range(1, 18), *range(31, 34), *range(63, 66), *range(127, 130), 512)
# whole panels; ragged; less than a vector; one more than a panel; several blocks of K, the last of one element
SHAPES = [(576, 960), (37, 51), (64, 7), (1, 1), (1537, 49), (3073, 97)]


def skip_unless_available(form: LinearForm, dtype: torch.dtype) -> None:
    if form is OWN and native_status().form != "native":
        pytest.skip(native_status().reason)
    if form is ONEDNN and not has_onednn(dtype):
        pytest.skip("oneDNN packs nothing here")


@pytest.fixture(params=[OWN, ONEDNN, PLAIN], ids=lambda form: form.name)
def form(request, dtype) -> LinearForm:
    skip_unless_available(request.param, dtype)
    return request.param


@pytest.fixture(params=[OWN, ONEDNN], ids=lambda form: form.name)
def invariant_form(request, dtype) -> LinearForm:
    skip_unless_available(request.param, dtype)
    if request.param is ONEDNN and dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        pytest.skip("oneDNN adds up in another order for other numbers of rows where it uses AMX")
    return request.param


@pytest.fixture
def own(dtype) -> LinearForm:
    skip_unless_available(OWN, dtype)
    return OWN


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 130])
@pytest.mark.parametrize(("k", "o"), SHAPES)
def test_linear_is_a_product_with_the_transposed_weight(assert_close, form, dtype, rows, k, o):
    weight, bias, x = torch.randn(o, k).to(dtype), torch.randn(o).to(dtype), torch.randn(rows, k).to(dtype)
    for b in (None, bias):
        y = PackedLinear(weight, b, form)(x)
        assert y.shape == (rows, o)
        if rows:
            truth = x.double() @ weight.double().T
            assert_close(y, truth if b is None else truth + b.double())


@dtypes
@pytest.mark.parametrize(("k", "o", "has_bias"), [(576, 200, False), (37, 51, True), (1537, 49, True)])
def test_a_row_has_the_same_bits_beside_any_others_and_at_any_place(invariant_form, dtype, k, o, has_bias):
    bias = torch.randn(o).to(dtype) if has_bias else None
    linear = PackedLinear(torch.randn(o, k).to(dtype), bias, invariant_form)
    x = torch.randn(max(NUM_ROWS), k).to(dtype)
    alone = bits(torch.cat([linear(row) for row in x.split(1)]))
    for n in NUM_ROWS:
        assert torch.equal(bits(linear(x[:n])), alone[:n])
        assert torch.equal(bits(linear(x[-n:])), alone[-n:])
        assert torch.equal(bits(linear(x[n // 2 :])), alone[n // 2 :])


@dtypes
@pytest.mark.parametrize("k", [*range(1, 34), 63, 64, 65, 1568, 1569])
def test_a_row_has_the_same_bits_in_every_tile_and_at_every_end_of_k(assert_close, own, dtype, k):
    weight, x = torch.randn(51, k).to(dtype), torch.randn(66, k).to(dtype)
    linear = PackedLinear(weight, None, own)
    alone = torch.cat([linear(row) for row in x.split(1)])
    assert_close(alone, x.double() @ weight.double().T)
    for n in range(1, 67):
        assert torch.equal(bits(linear(x[:n])), bits(alone[:n]))
        assert torch.equal(bits(linear(x[-n:])), bits(alone[-n:]))


@dtypes
@pytest.mark.parametrize("rows", [1, 16, 130])
def test_threads_change_no_bits(own, dtype, rows, threads):
    linear = PackedLinear(torch.randn(1000, 577).to(dtype), torch.randn(1000).to(dtype), own)
    x = torch.randn(rows, 577).to(dtype)
    results = []
    for num_threads in (1, 2, 3):
        threads(num_threads)
        results.append(bits(linear(x)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@dtypes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("k", [576, 37])
def test_a_poisoned_row_stays_alone(own, dtype, poison, k):
    linear, x = PackedLinear(torch.randn(51, k).to(dtype), None, own), torch.randn(20, k).to(dtype)
    clean = linear(x)
    for row in range(20):
        poisoned = x.clone()
        poisoned[row] = poison
        y = linear(poisoned)
        others = [i for i in range(20) if i != row]
        assert not torch.isfinite(y[row]).any()
        assert torch.equal(bits(y[others]), bits(clean[others]))


@dtypes
@pytest.mark.parametrize("rows", [9, 33])
@pytest.mark.parametrize("k", [1, 37, 62, 1537])
def test_nothing_beyond_the_rows_of_x_and_of_the_weight_is_read(assert_close, own, dtype, k, rows):
    """NaN lies behind all; the infinite last element of a row meets only its own weight, not a padded zero."""
    weight, x = (torch.full((n + 1, k), torch.nan).to(dtype) for n in (51, rows))
    weight[:51], x[:rows] = torch.randn(51, k), torch.randn(rows, k)
    linear = PackedLinear(weight[:51], None, own)
    longer = torch.full((linear.packed.numel() + 4096,), torch.nan, dtype=dtype)
    longer[:-4096] = linear.packed.flatten()
    linear.packed = longer[:-4096].view_as(linear.packed)
    assert_close(linear(x[:rows]), x[:rows].double() @ weight[:51].double().T)
    x[4, -1] = torch.inf
    assert torch.equal(linear(x[:rows])[4], weight[:51, -1] * torch.inf)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_products_of_another_library_in_between_change_nothing_nor_are_changed(threads, num_threads):
    """Each sets up the processor's matrix tiles for itself, where there are any."""
    skip_unless_available(OWN, torch.bfloat16)
    threads(num_threads)
    linear = PackedLinear(torch.randn(200, 77).bfloat16(), None, OWN)
    x, a, b = (torch.randn(n, k).bfloat16() for n, k in ((50, 77), (50, 100), (100, 70)))
    num_rows = (1, 5, 16, 33, 50)
    theirs = [bits(a[:n] @ b) for n in num_rows]
    ours = [bits(linear(x[:n])) for n in num_rows]
    for _ in range(2):
        for n, their, our in zip(num_rows, theirs, ours, strict=True):
            assert torch.equal(bits(a[:n] @ b), their)
            assert torch.equal(bits(linear(x[:n])), our)
            assert torch.equal(bits(linear(x[:n])), our)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_take_the_plain_form(dtype):
    linear, x = PackedLinear(torch.randn(5, 3).to(dtype)), torch.randn(2, 3).to(dtype)
    assert linear.form is PLAIN
    assert linear(x).dtype is dtype


@dtypes
def test_a_packed_linear_lets_go_of_the_plain_weight(invariant_form, dtype):
    weight = torch.randn(64, 48).to(dtype)
    held = weakref.ref(weight)
    linear = PackedLinear(weight, form=invariant_form)
    del weight
    gc.collect()
    assert held() is None
    assert linear(torch.ones(1, 48, dtype=dtype)).shape == (1, 64)


def test_the_probe_finds_a_linear_whose_rows_depend_on_their_company():
    class Leaky(PackedLinear):
        def __call__(self, x):
            return super().__call__(x) + (1e-7 if len(x) == 8 else 0)

    assert not probe_row_invariance([PackedLinear(torch.randn(8, 24)), Leaky(torch.randn(9, 24))])


@dtypes
@pytest.mark.parametrize(("k", "o"), SHAPES)
def test_the_probe_trusts_what_keeps_rows_apart(invariant_form, dtype, k, o):
    assert probe_row_invariance([PackedLinear(torch.randn(o, k).to(dtype), form=invariant_form)])


@dtypes
def test_the_form_that_serves_where_ours_are_built_keeps_rows_apart(own, dtype):
    """Faster ones that do not are no choice: oneDNN's with AMX."""
    linears = [PackedLinear(torch.randn(o, k).to(dtype)) for k, o in SHAPES]
    assert probe_row_invariance(linears), {linear.form.name for linear in linears}


@dtypes
def test_the_fastest_form_falls_back_from_ours_to_onednn_to_plain(monkeypatch, dtype):
    choose = fastest_form.__wrapped__
    monkeypatch.setattr(linear_module, "native_status", lambda: dataclasses.replace(native_status(), form="torch"))
    monkeypatch.setattr(linear_module, "has_onednn", lambda _: True)
    assert choose("cpu", dtype) is ONEDNN
    monkeypatch.setattr(linear_module, "has_onednn", lambda _: False)
    assert choose("cpu", dtype) is PLAIN
    assert choose("cuda", dtype) is PLAIN


def test_onednn_is_off_where_its_private_ops_misbehave(monkeypatch):
    monkeypatch.delenv("LORAPLEX_NATIVE", raising=False)
    broken = dataclasses.replace(ONEDNN, pack=lambda weight: (_ for _ in ()).throw(RuntimeError("no such op")))
    wrong = dataclasses.replace(PLAIN, pack=lambda weight: weight + 1)
    for form in (broken, wrong):
        monkeypatch.setattr(linear_module, "ONEDNN", form)
        assert has_onednn(torch.float32) is False
    monkeypatch.setattr(linear_module, "ONEDNN", PLAIN)
    assert has_onednn(torch.float32) is True
    monkeypatch.setenv("LORAPLEX_NATIVE", "0")
    assert has_onednn(torch.float32) is False


def refuse_matrix_tiles() -> None:
    """Let the kernel refuse this process the permission that AMX needs, as a sandbox may."""
    load, equals, answer, arch_prctl, request = 0x20, 0x15, 0x06, 158, 0x1023
    refused, allowed = 0x00050000 | 1, 0x7FFF0000
    instructions = [
        (load, 0, 0, 0),
        (equals, 0, 3, arch_prctl),
        (load, 0, 0, 16),
        (equals, 0, 1, request),
        (answer, 0, 0, refused),
        (answer, 0, 0, allowed),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code)))
    prctl, no_new_privileges, seccomp = ctypes.CDLL(None).prctl, 38, 22
    assert prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert prctl(seccomp, 2, program, 0, 0) == 0


def save_products(path: str) -> None:
    """Products of the form that serves here, what rounding leaves of sums that cancel, and whether rows are apart."""
    torch.manual_seed(0)
    weight, x = torch.randn(300, 577).bfloat16(), torch.randn(70, 577).bfloat16()
    linear, cancelling = PackedLinear(weight), PackedLinear(torch.cat((weight, -weight), dim=1))
    assert linear.form is OWN
    torch.save((linear(x), cancelling(torch.cat((x, x), dim=1)), probe_row_invariance([linear, cancelling])), path)


def test_where_the_system_refuses_matrix_tiles_vectors_serve_all_rows(tmp_path, assert_close):
    skip_unless_available(OWN, torch.bfloat16)
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("no AMX here")
    paths = [tmp_path / "tiles", tmp_path / "vectors"]
    save_products(str(paths[0]))
    code = f"import test_linear; test_linear.refuse_matrix_tiles(); test_linear.save_products({str(paths[1])!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, timeout=300)
    (tiles, left_by_tiles, tiles_kept_apart), (vectors, left_by_vectors, vectors_kept_apart) = map(torch.load, paths)
    assert tiles_kept_apart
    assert vectors_kept_apart
    assert_close(tiles, vectors.double())
    assert not torch.equal(left_by_tiles, left_by_vectors), "the same form served where tiles were refused"
