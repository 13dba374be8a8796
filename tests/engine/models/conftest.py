"""Bases written by `transformers`, one folder per case, made once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support_models import CASES, write_hf_base


@pytest.fixture(scope="session", params=CASES)
def hf_base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each served architecture and variant in turn."""
    model_type, changes = CASES[request.param]
    return write_hf_base(tmp_path_factory.mktemp("hf") / request.param, model_type, **changes)


@pytest.fixture(scope="session")
def llama_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped queries."""
    return write_hf_base(tmp_path_factory.mktemp("hf") / "llama", *CASES["llama"][:1], **CASES["llama"][1])
