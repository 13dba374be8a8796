"""Compile every kernel that can be launched, for every chip, without a GPU, and say what the compilers made of it.

`python -m loraplex_engine.ops.triton.report docs/kernels.md` writes the table between the page's markers. A test
compiles some of the variants and holds them against the rules (`Compiled.check_rules`) and against the page.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loraplex_engine.ops.lora import triton_kernels
from loraplex_engine.ops.lora.triton_tiles import lora_variants
from loraplex_engine.ops.triton import attention_kernel
from loraplex_engine.ops.triton.attention_tiles import attention_variants
from loraplex_engine.ops.triton.chip import CHIPS, HALF_DTYPES, Variant

BEGIN, END = "<!-- table of kernels: begin -->", "<!-- table of kernels: end -->"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MODEL = "model"
# what is neither named nor a compile-time constant is an int
_LORA_TYPES = {
    "x_ptr": _MODEL,
    "y_ptr": _MODEL,
    "v_ptr": "*fp32",
    "rows_ptr": "*i32",
    "chunks_ptr": "*i32",
    "entries_ptr": "*i64",
    "scalings_ptr": "*fp32",
    "occupied_ptr": "*i8",
    "features_ptr": "*i64",
}
_ATTENTION_TYPES = {
    "q_ptr": _MODEL,
    "k_ptr": _MODEL,
    "v_ptr": _MODEL,
    "out_ptr": _MODEL,
    "tables_ptr": "*i32",
    "query_start_ptr": "*i32",
    "context_len_ptr": "*i32",
    "scale": "fp32",
}
SOURCES: Mapping[str, tuple[Any, Mapping[str, str]]] = {
    "shrink": (triton_kernels._lora_shrink_kernel, _LORA_TYPES),
    "expand": (triton_kernels._lora_expand_kernel, _LORA_TYPES),
    "attention": (attention_kernel._paged_attention_kernel, _ATTENTION_TYPES),
}
_TENSOR_CORE_PTX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
_TENSOR_CORE_SASS = re.compile(r"\b(?:HMMA|HGMMA|UTCHMMA|UTCQMMA|IMMA|DMMA)\b")
_WIDE_COPY = re.compile(r"\b(?:LDGSTS|LDG)\.[\w.]*\b128\b")
_SPILL = re.compile(r"\b(?:STL|LDL)\b")


def dispatchable_variants() -> Iterator[Variant]:
    """All that can be launched on a chip, whatever the model."""
    return itertools.chain(lora_variants(), attention_variants())


@dataclass(frozen=True)
class Compiled:
    """One variant on one chip."""

    variant: Variant
    chip: int
    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a program."""
    spills: int
    """Instructions that store to or load from local memory."""
    tensor_core: str
    """The PTX instruction that multiplies tiles, or nothing."""
    has_tensor_core_sass: bool
    has_wide_copies: bool
    """Whether it reads 16 bytes at once."""

    def check_rules(self) -> None:
        """Raise `AssertionError` where a compiler made of the kernel what it must not be."""
        wants_tensor_core = self.variant.dtype in HALF_DTYPES
        assert self.spills == 0, f"{self} spills registers"
        assert bool(self.tensor_core) is self.has_tensor_core_sass is wants_tensor_core, f"{self}: wrong instructions"
        assert self.has_wide_copies or not self.variant.is_aligned, f"{self} reads less than 16 bytes at once"

    def to_row(self) -> str:
        """A row of the page's table."""
        variant = self.variant
        cells = (
            f"sm_{self.chip}",
            variant.op,
            TYPES[variant.dtype],
            "aligned" if variant.is_aligned else "ragged",
            variant.detail,
            self.registers,
            self.shared_bytes,
            self.spills,
            f"`{self.tensor_core}`" if self.tensor_core else "`fma`",
            16 if self.has_wide_copies else "2 or 4",
        )
        return "| " + " | ".join(map(str, cells)) + " |"


def compile_variant(variant: Variant, chip: int) -> Compiled:
    """Compile for a chip that need not be there.

    Raises:
        subprocess.CalledProcessError: `cuobjdump` cannot read what was compiled.
        subprocess.TimeoutExpired: it took a minute.
    """
    kernel, types = SOURCES[variant.op]
    tile, constants = variant.tile(chip)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    signature = {n: f"*{TYPES[variant.dtype]}" if kind == _MODEL else kind for n, kind in signature.items()}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=tile.launch_options)
    usage, sass = _disassemble(compiled.asm["cubin"])
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    return Compiled(
        variant,
        chip,
        registers=int(registers[1]),
        shared_bytes=compiled.metadata.shared,
        spills=len(_SPILL.findall(sass)),
        tensor_core=", ".join(sorted(set(_TENSOR_CORE_PTX.findall(compiled.asm["ptx"])))),
        has_tensor_core_sass=bool(_TENSOR_CORE_SASS.search(sass)),
        has_wide_copies=bool(_WIDE_COPY.search(sass)),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and SASS, by the tool in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (_run(tool, option, file.name) for option in ("-res-usage", "-sass"))
    return usage, sass


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603


def write_table(page: str, compiled: Sequence[Compiled]) -> str:
    """The page with a new table between its markers.

    Raises:
        ValueError: the page has no markers.
    """
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    head = (
        f"Triton {triton.__version__}, {len(compiled)} compilations.\n",
        "| chip | op | type | rows | case | registers | shared bytes | spills | product | bytes a load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    return "\n".join((before + BEGIN, "", *head, *(one.to_row() for one in compiled), "", END + after))


def main() -> None:
    """Compile all, check the rules, write the table."""
    parser = argparse.ArgumentParser(description="Compile all Triton kernels for all chips; write a table of them.")
    parser.add_argument("page", type=Path, help="a Markdown file with the two markers")
    page = parser.parse_args().page
    compiled = []
    for chip, variant in itertools.product(CHIPS, dispatchable_variants()):
        compiled.append(compile_variant(variant, chip))
        compiled[-1].check_rules()
        sys.stdout.write(compiled[-1].to_row() + "\n")
        sys.stdout.flush()
    page.write_text(write_table(page.read_text(encoding="utf-8"), compiled), encoding="utf-8")


if __name__ == "__main__":
    main()
