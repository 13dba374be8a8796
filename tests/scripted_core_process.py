"""`scripted_core.ScriptedCore` as a process, started like the real core; `served_model_name` chooses what it does."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import zmq

from loraplex_engine.config import CoreLaunch
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.wire import messages as wire
from scripted_core import ScriptedCore


def main() -> int:
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreLaunch)
    if launch.config.served_model_name == "fails":
        return fail(launch)
    if launch.config.served_model_name == "exits":
        return 7
    tokenizer = Tokenizer(Path(launch.config.base))
    core = ScriptedCore(lambda text: tokenizer.encode_prompt(text, add_special_tokens=False))
    core.pace_s = 0.05
    core.hangs_after = 2 if launch.config.served_model_name == "hangs" else None
    core.compiles_s = 0.5 if launch.config.served_model_name == "compiles" else 0.0
    core.replies["state"] = {
        "environment": sorted(os.environ),
        "argv": sys.argv,
        "key": launch.engine_key,
        "calls": core.calls,
    }
    asyncio.run(core.run(launch.to_core, launch.to_front))
    return 0


def fail(launch: CoreLaunch) -> int:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(launch.to_front)
    socket.send(wire.encode(wire.CoreFailed("The base does not fit: lower --max-model-len.")))
    context.destroy(linger=1000)
    return 3


if __name__ == "__main__":
    sys.exit(main())
