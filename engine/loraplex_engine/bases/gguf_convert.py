"""Turns a GGUF file into the files of a Hugging Face folder, weights in float32."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

from loraplex_engine.bases.gguf_file import GgufFile
from loraplex_engine.bases.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from loraplex_engine.bases.progress import PullProgress
from loraplex_engine.errors import BaseUnavailableError
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.layout import check_tensors, expected_tensors
from loraplex_engine.weights.index import SINGLE_FILE
from loraplex_engine.weights.writer import StreamWriter


def convert_gguf(source: Path, folder: Path, progress: PullProgress) -> dict[str, str]:
    """Write weights, config and tokenizer of `source` into `folder`.

    Returns:
        Name to sha256 (hex) of each tensor's float32 bytes.

    Raises:
        BaseUnsupportedError: the file holds something that is not served, by name.
        BaseUnavailableError: the disk is too small.
    """
    file = GgufFile(source)
    raw_config = file.read_config()
    config = ModelConfig.from_hf(raw_config)
    file.check_names(config)
    check_tensors(config, ((name, file.shape(name)) for name in expected_tensors(config)))
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", build_tokenizer_config(file))
    _write_json(folder / "config.json", raw_config)
    return _write_weights(file, config, folder, progress)


def _write_weights(file: GgufFile, config: ModelConfig, folder: Path, progress: PullProgress) -> dict[str, str]:
    shapes = expected_tensors(config)
    total_bytes = 4 * sum(prod(shape) for shape in shapes.values())
    check_space(folder, total_bytes)
    progress.begin("Dequantising to float32", total_bytes)
    with StreamWriter(folder / SINGLE_FILE, shapes) as writer:
        for name in shapes:
            for piece in file.read_tensor(name, config):
                writer.write(name, piece.data.cast("B"))
                progress.advance(piece.nbytes)
    return writer.hashes


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse before the work where the disk cannot hold the result."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise BaseUnavailableError(
            f"The base needs {num_bytes >> 20} MiB in {folder.parent}, but only {free >> 20} MiB are free; free some "
            "or set LORAPLEX_CACHE_DIR."
        )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
