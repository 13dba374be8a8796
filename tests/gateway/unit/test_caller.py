"""What an identity may name: only the platform's keys see every tenant, and whoever has none sees nothing."""

from __future__ import annotations

from typing import Any, cast

import pytest

from loraplex.gateway.inference import Inference
from loraplex_registry.wire.identity import Identity


def identity(role: str) -> Identity:
    return Identity(
        role=role, tenant_id=None, tenant=None, scopes=("infer",), key_id="key_1", actor="ada", request_id="req_1"
    )


@pytest.fixture
def inference() -> Inference:
    nothing: Any = cast("Any", None)
    return Inference(nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize("role", ["tenant", "engine", "some-later-role"])
def test_an_identity_without_a_tenant_does_not_see_them_all(inference: Inference, role: str) -> None:
    with pytest.raises(AssertionError):
        inference.build_caller(identity(role))


@pytest.mark.parametrize("role", ["admin", "admin_readonly"])
def test_platform_keys_see_every_tenant(inference: Inference, role: str) -> None:
    assert inference.build_caller(identity(role)).tenant is None
