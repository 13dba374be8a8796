"""Fuzzing of what reads an adapter's bytes: `make fuzz`, or one target by `python tests/fuzz_adapter.py header`.

Each target takes any bytes and fails where a promise is broken: no exception but the rules' own, no slow input, what
is accepted is what the `safetensors` library or plain JSON read too. With atheris the search is led by coverage; the
tests run the same targets on mutations that hypothesis makes.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from loraplex_registry.peft import config as config_module
from loraplex_registry.peft import header as header_module
from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.report import CHECK_NAMES, build_report

MAX_CPU_S = 2.0
_WORDS = (
    "null",
    "true",
    "false",
    "NaN",
    "-Infinity",
    "1e999",
    "4.0",
    "[[",
    "{}",
    "F16",
    "I64",
    "all-linear",
    "lora_only",
)
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "rank_pattern": {"layers.0.self_attn.q_proj": 2},
    "layers_to_transform": [0, 1],
    "modules_to_save": None,
    "trainable_token_indices": {"embed_tokens": [1, 2]},
    "init_lora_weights": True,
}
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "base_model.model.a.lora_A.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
    "base_model.model.a.lora_B.weight": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [8, 12]},
}
CONFIG_SEED = json.dumps(CONFIG).encode()
HEADER_SEED = struct.pack("<Q", len(json.dumps(HEADER))) + json.dumps(HEADER).encode() + bytes(12)


def fuzz_header(data: bytes) -> None:
    """A whole weights file: read, or refused by its name; what is read is what safetensors reads."""
    import safetensors

    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        begin_s = time.process_time()
        found = _read(file)
        assert time.process_time() - begin_s < MAX_CPU_S
    if isinstance(found, AdapterFileError):
        assert found.check in CHECK_NAMES
        assert found.message
        json.dumps([found.message, found.subject]).encode()
        return
    table = found
    assert sum(ref.stop - ref.start for ref in table.tensors) == len(data) - table.data_start
    theirs = {name: entry["shape"] for name, entry in safetensors.deserialize(data)}
    assert theirs == {ref.name: list(ref.shape) for ref in table.tensors}


def _read(file: BinaryIO) -> header_module.TensorTable | AdapterFileError:
    try:
        return header_module.read_open_header(file, "x")
    except AdapterFileError as error:
        return error


def fuzz_json(data: bytes) -> None:
    """The JSON of a header alone, in front of bytes for the tensors of the seed."""
    fuzz_header(struct.pack("<Q", len(data)) + data + bytes(12))


def fuzz_config(data: bytes) -> None:
    """A config: judged without an exception, in a short and whole report; what is accepted is what JSON says."""
    findings = Findings()
    begin_s = time.process_time()
    parsed = config_module.judge_config(data, findings)
    report = build_report(findings.checks())
    assert time.process_time() - begin_s < MAX_CPU_S
    assert len(json.dumps([[check.message, check.subject] for check in report.checks])) < 1 << 20
    if report.verdict == "fail":
        failed = [check for check in report.checks if check.verdict == "fail"]
        # a line that counts what is left out is about no one thing
        assert all(check.message and (check.subject or "left out" in check.message) for check in failed)
        return
    assert parsed is not None
    assert parsed.settings is not None
    plain = json.loads(data)
    assert (plain["r"], plain["lora_alpha"]) == (parsed.settings.r, parsed.settings.lora_alpha)
    assert plain["peft_type"] == "LORA"


TARGETS: dict[str, tuple[Callable[[bytes], None], bytes]] = {
    "file": (fuzz_header, HEADER_SEED),
    "header": (fuzz_json, HEADER_SEED[8:-12]),
    "config": (fuzz_config, CONFIG_SEED),
}


def main() -> None:
    """Fuzz one target until libFuzzer's own options say stop, or a promise is broken."""
    try:
        import atheris
    except ImportError:
        sys.exit("Fuzzing led by coverage needs atheris (Linux): .venv/bin/python -m pip install 'atheris>=3'")
    name = sys.argv.pop(1)
    target, seed = TARGETS[name]
    corpus = Path(os.environ.get("LORAPLEX_FUZZ_CORPUS", f".fuzz/{name}"))
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / "seed").write_bytes(seed)
    words = {word for word in json.dumps([CONFIG, HEADER]).replace('"', " ").split() if word.isascii()}
    dictionary = corpus.parent / f"{name}.dict"
    dictionary.write_text("".join(f'"{word}"\n' for word in sorted({*words, *_WORDS}) if "\\" not in word))
    atheris.instrument_all()
    options = [
        f"-dict={dictionary}",
        "-max_len=4096",
        "-timeout=10",
        "-rss_limit_mb=1024",
        f"-artifact_prefix={corpus.parent}/{name}-",
    ]
    atheris.Setup([sys.argv[0], *options, *sys.argv[1:], str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
