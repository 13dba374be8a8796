"""Weights of the base for the loader process, read from its files without torch, as the engine serves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.lora.stored import ShortFileError, as_served, read_chunks, read_tensor
from loraplex_engine.weights.index import TensorEntry, read_index
from loraplex_registry.peft.spec import BaseSpec


class BaseUnreadableError(Exception):
    """The weights of the base cannot be read from disk; pull the base again."""


class BaseWeights:
    """Matrices and biases of the base in `folder`, rounded to `dtype`, the model's; float64 on the way out."""

    def __init__(self, folder: Path, spec: BaseSpec, dtype: str) -> None:
        self.spec = spec
        self.dtype = dtype
        self._folder = folder

    def read_rows(self, path: str) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Yield the rows of a module's matrix as stored, a few at a time; a tied head has the embedding's.

        Raises:
            BaseUnreadableError: They are not there any more.
        """
        tied = self.spec.modules[path].tied
        entry = self._get(f"{self._embedding if tied else path}.weight")
        with _explained(), entry.file.open("rb") as file:
            for span, rows in read_chunks(file, entry):
                yield span, as_served(rows, self.dtype)

    def find_bias(self, path: str) -> NDArray[np.float64] | None:
        """The module's bias [O]; None if the base has none there.

        Raises:
            BaseUnreadableError: It is not there any more.
        """
        if not self.spec.modules[path].has_bias:
            return None
        entry = self._get(f"{path}.bias")
        with _explained(), entry.file.open("rb") as file:
            return as_served(read_tensor(file, entry), self.dtype)

    @cached_property
    def _index(self) -> dict[str, TensorEntry]:
        with _explained():
            return read_index(self._folder)

    @cached_property
    def _embedding(self) -> str:
        return next(path for path, module in self.spec.modules.items() if module.kind == "embedding")

    def _get(self, name: str) -> TensorEntry:
        entry = self._index.get(name)
        if entry is None:
            raise BaseUnreadableError(f"the base's files lack {name}")
        return entry


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (OSError, BaseUnsupportedError, ShortFileError) as error:
        raise BaseUnreadableError(str(error)) from error
