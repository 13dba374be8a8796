"""The good adapters of a folder of cases (LORAPLEX_TEST_CASES), where there is one, against PEFT's own logits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engines import EngineWorld, assert_logits_close
from loraplex_engine.bases.pull import pull
from loraplex_registry.peft.check import check_adapter
from support import write_tokenizer

CASES = os.environ.get("LORAPLEX_TEST_CASES")
REFERENCE = "_peft_ref.safetensors"
BASE = "tiny-llama-fixture"
REFUSED = {"F16_pissa": "field_unsupported", "F18_replication": "field_unsupported"}
pytestmark = pytest.mark.skipif(not CASES, reason="LORAPLEX_TEST_CASES names no folder of cases")


def test_every_good_fixture_is_parity_or_refused_by_name_all_in_one_batch(tmp_path: Path) -> None:
    out = tmp_path / "fixtures"
    out.mkdir()
    command = [sys.executable, str(Path(str(CASES)) / "make_fixtures.py"), "--base", "tiny", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=600, cwd=tmp_path)
    (out / "_base").rename(tmp_path / BASE)
    write_tokenizer(tmp_path / BASE)
    good = sorted(folder for folder in out.glob("F*") if (folder / REFERENCE).exists())
    assert len(good) >= 17
    base = pull(str(tmp_path / BASE), tmp_path / "bases")
    world = EngineWorld(base, tmp_path / "cache", cpu_threads=1, max_loras=len(good), max_num_seqs=32)
    digests, references = [], []
    for folder in good:
        reference = load_file(folder / REFERENCE)
        (folder / REFERENCE).unlink()
        if folder.name in REFUSED:
            report, plan = check_adapter({file.name: file for file in folder.iterdir()}, world.loader.spec)
            assert plan is None
            assert REFUSED[folder.name] in {check.name for check in report.checks if check.verdict == "fail"}
            continue
        digests.append(world.put(folder))
        references.append(reference)
    prompt = references[0]["input_ids"][0].tolist()
    found = world.score([(prompt, digest) for digest in digests])
    for logits, reference in zip(found, references, strict=True):
        assert_logits_close(logits, reference["logits"][0], atol=1e-4, gap=1e-3)
