"""What is skipped, by name, where the control plane is installed without its engine."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_engine = pytest.mark.skipif(find_spec("torch") is None, reason="the engine is not installed")
