"""All fuzz targets by name."""

from __future__ import annotations

from fuzz_adapter import ADAPTER_TARGETS
from fuzz_base import BASE_TARGETS
from fuzz_engine import ENGINE_TARGETS
from fuzz_gateway import GATEWAY_TARGETS
from fuzz_http import HTTP_TARGETS
from fuzz_registry import REGISTRY_TARGETS

TARGETS = {
    target.name: target
    for target in (*ADAPTER_TARGETS, *REGISTRY_TARGETS, *GATEWAY_TARGETS, *HTTP_TARGETS, *ENGINE_TARGETS, *BASE_TARGETS)
}
