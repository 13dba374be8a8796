"""What the engine hears of the process that computes a reference when that says nonsense."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from loraplex_engine.parity.job import ParityFailed
from loraplex_engine.parity.process import ReferenceProcess


@pytest.mark.parametrize("message", [b"\xc1", b"\x82", b"\x91" * 100_000], ids=["text", "cut", "nested"])
def test_nonsense_is_a_failed_reference(message: bytes) -> None:
    ours, theirs = Pipe()
    process = ReferenceProcess.__new__(ReferenceProcess)
    process._pipe = ours
    theirs.send_bytes(message)
    found = process.poll()
    assert isinstance(found, ParityFailed)
    assert "cannot be read" in found.message
    for end in (ours, theirs):
        end.close()
