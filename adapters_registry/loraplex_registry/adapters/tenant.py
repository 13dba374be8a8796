"""The tenant whose adapters a request is about. Tenants themselves belong to the gateway."""

from __future__ import annotations

import msgspec

from loraplex_registry.errors import NotFoundError
from loraplex_registry.wire.identity import Identity


class TenantRef(msgspec.Struct, frozen=True):
    """A tenant as rows refer to it."""

    id: str
    name: str


def find_target(by: Identity, name: str) -> TenantRef:
    """Return the tenant `name` of the path, as the gateway vouched for it, or the caller's own.

    Raises:
        NotFoundError: The token does not say that the caller may see this tenant.
    """
    if by.target_tenant == name and by.target_tenant_id:
        return TenantRef(by.target_tenant_id, name)
    if by.tenant == name and by.tenant_id:
        return TenantRef(by.tenant_id, name)
    raise NotFoundError(f"There is no tenant {name}, or it is not yours", param="tenant")
