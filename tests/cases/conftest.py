"""One tiny base with its adapters for all cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from case_world import Cases
from loraplex_engine.bases.pull import pull
from support import tiny_llama_config, write_base


@pytest.fixture(scope="session")
def cases(bases_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """The tiny base, long enough for prompts of 512 tokens, and its adapters."""
    source = write_base(bases_folder / "tiny-cases", tiny_llama_config(max_position_embeddings=1024))
    tmp = tmp_path_factory.mktemp("cases")
    return Cases(pull(str(source), tmp / "bases"), tmp)
