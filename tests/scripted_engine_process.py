"""`scripted_engine.ScriptedEngine` as a process that can be killed: `python tests/scripted_engine_process.py PORT`."""

from __future__ import annotations

import sys

import uvicorn

from scripted_engine import ScriptedEngine

if __name__ == "__main__":
    uvicorn.run(ScriptedEngine(), port=int(sys.argv[1]), log_level="critical", lifespan="off", ws="none")
