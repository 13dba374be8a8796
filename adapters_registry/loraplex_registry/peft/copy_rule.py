"""Whether tensors are the copies that they must be: of a matrix of the base, or of the tensor that they are tied to.

PEFT saves the base's embedding or head beside LoRA on it. Such a copy is needed by nobody, and anything else than a
copy would be another base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.spec import BaseSpec, TensorRef
from loraplex_registry.peft.tensor_rule import MatrixCopy, SameTensor
from loraplex_registry.peft.tying import find_tie

_BLOCK_BYTES = 4 * 1024**2
_WORD: dict[str, npt.DTypeLike] = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}


def judge_copies(
    copies: Sequence[MatrixCopy], name_to_sha256: Mapping[str, str], base: BaseSpec, findings: Findings
) -> tuple[str, ...]:
    """Refuse (`base_mismatch`) each whole matrix that is not the base's, cast to the tensor's dtype.

    Returns:
        The names of the copies, sorted.
    """
    for copy in copies:
        expected = _find_hashes(copy.path, base).get(copy.ref.dtype)
        if expected is None:
            message = (
                f"{copy.ref.name} cannot be compared with {base.name}, which was described before its matrices were "
                "hashed: pull the base again, or save the adapter with save_embedding_layers=False."
            )
            findings.fail("base_mismatch", message, copy.ref.name)
        elif name_to_sha256[copy.ref.name] != expected:
            message = (
                f"{copy.ref.name} is not the matrix of {base.name}: train on this base, name it in modules_to_save if "
                "it was trained, or save the adapter with save_embedding_layers=False if it was not (a base that was "
                "trained on in fewer bits comes out different)."
            )
            findings.fail("base_mismatch", message, copy.ref.name)
    return tuple(sorted(copy.ref.name for copy in copies))


def _find_hashes(path: str, base: BaseSpec) -> dict[str, str]:
    tie = find_tie(base)
    return base.matrix_hashes.get(tie.embedding if tie is not None else path, {})


def judge_same(
    pairs: Iterable[SameTensor], name_to_sha256: Mapping[str, str], file: BinaryIO, findings: Findings
) -> None:
    """Refuse (`unexpected_tensor`) a tensor that differs from the one it is tied to.

    PEFT holds both in one memory in float32 and apart in bfloat16, so a file where they differ means two things.
    """
    for pair in pairs:
        if pair.is_transposed:
            is_same = pair.ref.dtype == pair.other.dtype and _is_transposed(file, pair.ref, pair.other)
        else:
            is_same = (pair.ref.dtype, name_to_sha256[pair.ref.name]) == (
                pair.other.dtype,
                name_to_sha256[pair.other.name],
            )
        if not is_same:
            message = (
                f"{pair.ref.name} differs from {pair.other.name}, which ensure_weight_tying makes the same; set it to "
                "false and name both modules in the config to serve each as it is."
            )
            findings.fail("unexpected_tensor", message, pair.ref.name)


def _is_transposed(file: BinaryIO, ref: TensorRef, other: TensorRef) -> bool:
    """Whether `ref` is `other` turned; reads both once, in blocks of about `_BLOCK_BYTES`."""
    (rows, columns), width = ref.shape, _width(ref)
    if other.shape != (columns, rows):
        return False
    if rows > columns:
        return _is_transposed(file, other, ref)
    step = max(1, _BLOCK_BYTES // (rows * width))
    for start in range(0, columns, step):
        count = min(step, columns - start)
        turned = _read_words(file, other, start * rows, count * rows).reshape(count, rows).T
        for row in range(rows):
            if not np.array_equal(_read_words(file, ref, row * columns + start, count), turned[row]):
                return False
    return True


def _width(ref: TensorRef) -> int:
    return np.dtype(_WORD[ref.dtype]).itemsize


def _read_words(file: BinaryIO, ref: TensorRef, start: int, count: int) -> npt.NDArray[np.unsignedinteger]:
    """Read `count` elements of a tensor from its element `start` on."""
    file.seek(ref.start + start * _width(ref))
    return np.frombuffer(file.read(count * _width(ref)), _WORD[ref.dtype])
