"""Tests of the Triton kernels.

What lies in `interpreted` runs in a process of its own with TRITON_INTERPRET=1, started by `test_interpreter.py`:
Triton decides when a kernel is defined whether it is compiled or interpreted. To run it by hand:
`TRITON_INTERPRET=1 pytest tests/engine/ops/triton/interpreted`.
"""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
