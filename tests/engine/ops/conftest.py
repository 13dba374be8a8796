"""Cases for the op tests: random inputs in which everything that must not be read is NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from loraplex_engine.core.module_group import EMBEDDING_GROUP, GROUPS
from loraplex_engine.ops.dispatch import Kernels, select_kernels
from loraplex_engine.ops.lora.table import GroupShape, LoraModule, LoraTable
from loraplex_engine.ops.native.build import native_status
from support_attention import History, PagedBatch, make_history, page

# largest error over largest true value
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Callable[[torch.dtype], Kernels]:
    """The kernels of one form for a dtype."""
    if request.param == "native":
        return _native_kernels
    return lambda _: select_kernels("meta", torch.float32)


@pytest.fixture
def native() -> Callable[[torch.dtype], Kernels]:
    """The native kernels, whose rows must be independent to the bit."""
    return _native_kernels


def _native_kernels(dtype: torch.dtype) -> Kernels:
    if native_status().form != "native":
        pytest.skip(native_status().reason)
    return select_kernels("cpu", dtype)


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Check a result against the truth in float64, by the one table of tolerances."""

    def check(result: Tensor, truth: Tensor) -> None:
        assert result.shape == truth.shape
        assert torch.isfinite(result).all()
        error = (result.double() - truth.double()).abs().max() / truth.double().abs().max().clamp(min=1e-3)
        assert error.item() <= TOLERANCE[result.dtype]

    return check


@pytest.fixture
def history() -> Callable[[int, int, int, int, torch.dtype], History]:
    return make_history


@pytest.fixture
def paged() -> Callable[..., PagedBatch]:
    return page


@dataclass
class Adapter:
    """The modules of one adapter for one layer, by (group, slice)."""

    modules: dict[tuple[str, int], LoraModule] = field(default_factory=dict)

    def put(self, table: LoraTable, slot: int, layer: int = 0) -> None:
        for (group, i_slice), m in self.modules.items():
            table.set_module(slot, layer, group, i_slice, m.a, m.b, m.scaling, m.g, m.c)

    def double(self) -> Adapter:
        return Adapter({place: _map(module, Tensor.double) for place, module in self.modules.items()})

    def fill(self, value: float) -> None:
        """Overwrite all matrices and vectors."""
        for module in self.modules.values():
            _map(module, lambda tensor: tensor.fill_(value))


def _map(module: LoraModule, change: Callable[[Tensor], Tensor]) -> LoraModule:
    a, b, g, c = (None if t is None else change(t) for t in (module.a, module.b, module.g, module.c))
    return LoraModule(a, b, module.scaling, g, c)


# widths that are multiples of nothing, and one wider than a task's columns
SHAPES = {
    "qkv": GroupShape(37, (50, 18, 18)),
    "o": GroupShape(50, (37,)),
    "gate_up": GroupShape(37, (67, 67)),
    "down": GroupShape(67, (600,)),
    "embedding": GroupShape(90, (37,)),
    "head": GroupShape(37, (90,)),
}


def make_adapter(ranks: dict[str, int], dtype: torch.dtype, vectors: str = "") -> Adapter:
    """An adapter with a rank for each module it targets, by PEFT's names, and the vectors named: any of `g` and `c`."""
    adapter = Adapter()
    for group, names in GROUPS.items():
        for i_slice, name in enumerate(names):
            rank = ranks.get(name, 0)
            if rank or (name in ranks and vectors):
                adapter.modules[group, i_slice] = make_module(group, i_slice, rank, dtype, vectors)
    return adapter


def make_module(group: str, i_slice: int, rank: int, dtype: torch.dtype, vectors: str) -> LoraModule:
    inputs, outputs = SHAPES[group].in_features, SHAPES[group].out_features[i_slice]
    a = torch.randn(*((inputs, rank) if group == EMBEDDING_GROUP else (rank, inputs))).to(dtype)
    b = torch.randn(rank, outputs).to(dtype)
    g, c = (torch.randn(outputs) if vector in vectors else None for vector in "gc")
    return LoraModule(a if rank else None, b if rank else None, 0.25 + torch.rand(()).item(), g, c)


def make_table(num_slots: int, dtype: torch.dtype, num_layers: int = 1, max_rank: int = 64) -> LoraTable:
    return LoraTable(num_slots, num_layers, SHAPES, max_rank, dtype)


@pytest.fixture
def adapter() -> Callable[..., Adapter]:
    return make_adapter


@pytest.fixture
def lora_table() -> Callable[..., LoraTable]:
    return make_table
