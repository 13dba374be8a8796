"""The core's end of the loader's pipe, when the other end breaks off in the middle."""

from __future__ import annotations

from multiprocessing import Pipe

import msgspec
import pytest

from loraplex_engine.lora.loader import LoaderProcess
from loraplex_engine.lora.packed import LoadDone, LoadFailed
from loraplex_registry.peft.spec import BaseSpec

BASE = BaseSpec("tiny", (), "sha256:0", "", 8, {})


def test_process_that_dies_between_facts_and_descriptor_fails_the_load_it_owes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    monkeypatch.setattr(LoaderProcess, "_spawn", lambda self: setattr(self, "_pipe", ours))
    loader = LoaderProcess(cache_dir="", base=BASE, base_dir="", dtype="float32")
    loader.start("sha256:x")
    loader.start("sha256:y")
    for _ in range(2):
        theirs.recv_bytes()
    theirs.send_bytes(msgspec.msgpack.encode(LoadDone("sha256:x", 64, 8, (), 0.0, 0.0, 0.0)))
    theirs.close()
    results = loader.take_finished()
    assert [(result.digest, type(result)) for result in results] == [
        ("sha256:x", LoadFailed),
        ("sha256:y", LoadFailed),
    ]
