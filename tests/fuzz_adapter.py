"""Fuzz targets of what reads an adapter's bytes: files, names, templates.

No exception but the rules' own, no slow input; what is accepted is what the `safetensors` library or plain JSON read
too. `tests/registry/unit/peft/test_fuzz.py` runs some of them on mutations that hypothesis makes.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fuzz_target import KILLED_BY_LIMIT, Target, run_forked
from loraplex_registry.peft import config as config_module
from loraplex_registry.peft import header as header_module
from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.file_rule import check_names
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.limit import MAX_CPU_S as TASK_CPU_S
from loraplex_registry.peft.limit import limit_task
from loraplex_registry.peft.magic import judge_side_files
from loraplex_registry.peft.report import CHECK_NAMES, build_report
from loraplex_registry.peft.template_process import RenderAnswer, RenderJob, render
from loraplex_registry.peft.template_rule import judge_template
from template_texts import STYLES

MAX_CPU_S = 2.0
_WORDS = (
    b"null",
    b"true",
    b"NaN",
    b"1e999",
    b"4.0",
    b"[[",
    b"{}",
    b"F16",
    b"I64",
    b"shape",
    b"data_offsets",
    b"all-linear",
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


def fuzz_tokenizer_config(data: bytes) -> None:
    """A tokenizer's config beside an adapter: it is looked into for a template, and never more."""
    _judge_files({"tokenizer_config.json": data})


def fuzz_template_file(data: bytes) -> None:
    """A template of an adapter as a file: its size, its text and what it might be instead."""
    _judge_files({"chat_template.jinja": data})


def _judge_files(files: dict[str, bytes]) -> None:
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, name) for name in files}
        for name, data in files.items():
            paths[name].write_bytes(data)
        judge_template(paths, findings, is_rendered=False)
        judge_side_files(paths, findings)
    json.dumps([[check.message, check.subject] for check in findings.checks()]).encode()


def fuzz_names(data: bytes) -> None:
    """Names of files: what passes is a plain name, and no step to elsewhere."""
    names = data.decode("utf-8", "surrogateescape" if data[:1] == b"s" else "replace").split("\n")
    checks = check_names(names, is_whole=False)
    json.dumps([[check.message, check.subject] for check in checks]).encode()
    if all(check.verdict == "pass" for check in checks):
        assert all(Path(name).name == name and name.isascii() and not name.startswith(".") for name in names)


def fuzz_template(data: bytes) -> None:
    """A template of a tenant, read and rendered as its process does, in a fork that the kernel may end."""
    job = RenderJob(data.decode("utf-8", "replace"), "What?", {"bos_token": "<s>"})

    def work() -> bytes:
        limit_task(TASK_CPU_S)
        return msgspec.json.encode(render(job))

    answer = run_forked(work, KILLED_BY_LIMIT)
    if answer is not None:
        msgspec.json.decode(answer, type=RenderAnswer)


TEMPLATES = tuple(text.encode() for text in STYLES.values())
ADAPTER_TARGETS = (
    Target("weights_file", fuzz_header, (HEADER_SEED,), words=_WORDS),
    Target("weights_header", fuzz_json, (HEADER_SEED[8:-12],), words=_WORDS),
    Target("adapter_config", fuzz_config, (CONFIG_SEED,), words=_WORDS),
    Target("adapter_file_names", fuzz_names, (b"adapter_config.json\nadapter_model.safetensors", b"tokenizer.json")),
    Target("adapter_tokenizer_config", fuzz_tokenizer_config, (b'{"chat_template": "{{ messages }}"}', b"{}")),
    Target("adapter_template_file", fuzz_template_file, (*TEMPLATES, b"\x80\x04\x95", b"PK\x03\x04")),
    Target("adapter_template", fuzz_template, TEMPLATES, words=(b"{%", b"%}", b"{{", b"}}", b"for", b"range(9)")),
)
