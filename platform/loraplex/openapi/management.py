"""The operations on tenants and keys, and the reports: audit, fleet."""

from __future__ import annotations

from loraplex.audit.action import ACTIONS
from loraplex.openapi.operation import Answer, Body, Operation, Parameter
from loraplex.openapi.parameter import OF_TENANT, PAGE, SPAN, TENANT
from loraplex.openapi.schema import FLAG, Schema, list_of, ref

_TENANTS = "/api/v1/tenants"
_TENANT = _TENANTS + "/{tenant}"
_KEYS = _TENANT + "/keys"
_WORD: Schema = {"type": "string", "format": "shown-text", "minLength": 1, "maxLength": 300}

_KEY_ID = Parameter("key_id", "path", {"type": "string", "pattern": "^key_[a-z2-7]{26}$"})

MANAGEMENT: tuple[Operation, ...] = (
    Operation(
        method="post",
        path=_TENANTS,
        name="createTenant",
        tag="tenants",
        summary="Create a tenant",
        answers=(Answer(201, "Created", ref("Tenant")),),
        codes=("invalid_name", "name_reserved", "conflict"),
        body=Body(ref("TenantCreate")),
    ),
    Operation(
        method="get",
        path=_TENANTS,
        name="listTenants",
        tag="tenants",
        summary="List tenants: all for platform keys, else the key's own",
        answers=(Answer(200, "One page, newest first", list_of("Tenant")),),
        parameters=PAGE,
    ),
    Operation(
        method="get",
        path=_TENANT,
        name="showTenant",
        tag="tenants",
        summary="Show a tenant",
        answers=(Answer(200, "The tenant", ref("Tenant")),),
        parameters=(TENANT,),
    ),
    Operation(
        method="patch",
        path=_TENANT,
        name="changeTenant",
        tag="tenants",
        summary="Change a tenant by a JSON merge patch: null clears",
        answers=(Answer(200, "The tenant as it is now", ref("Tenant")),),
        codes=("conflict",),
        parameters=(TENANT,),
        body=Body(ref("TenantPatch")),
    ),
    Operation(
        method="delete",
        path=_TENANT,
        name="deleteTenant",
        tag="tenants",
        summary="Delete a tenant",
        answers=(Answer(204, "Deleted"),),
        codes=("conflict",),
        parameters=(TENANT, Parameter("cascade", "query", FLAG, "Delete its adapters, too")),
    ),
    Operation(
        method="post",
        path=_KEYS,
        name="createKey",
        tag="keys",
        summary="Create a key",
        answers=(Answer(201, "The only answer that has the key itself", ref("NewKey")),),
        parameters=(TENANT,),
        body=Body(ref("KeyCreate")),
    ),
    Operation(
        method="get",
        path=_KEYS,
        name="listKeys",
        tag="keys",
        summary="List a tenant's keys",
        answers=(Answer(200, "One page, newest first, without secrets", list_of("Key")),),
        parameters=(TENANT, *PAGE),
    ),
    Operation(
        method="patch",
        path=_KEYS + "/{key_id}",
        name="changeKey",
        tag="keys",
        summary="Change a key's limits or priority by a JSON merge patch: null clears",
        answers=(Answer(200, "The key as it is now, without its secret", ref("Key")),),
        codes=("conflict",),
        parameters=(TENANT, _KEY_ID),
        body=Body(ref("KeyPatch")),
    ),
    Operation(
        method="post",
        path=_KEYS + "/{key_id}/rotate",
        name="rotateKey",
        tag="keys",
        summary="Make a key like this one, which ends after the overlap",
        answers=(Answer(201, "The new key; the only answer that has it", ref("NewKey")),),
        codes=("conflict",),
        parameters=(TENANT, _KEY_ID),
        body=Body(ref("KeyRotate")),
    ),
    Operation(
        method="delete",
        path=_KEYS + "/{key_id}",
        name="revokeKey",
        tag="keys",
        summary="Revoke a key, at once",
        answers=(Answer(204, "Revoked"),),
        parameters=(TENANT, _KEY_ID),
    ),
    Operation(
        method="get",
        path="/api/v1/audit",
        name="listEvents",
        tag="reports",
        summary="List what was done",
        answers=(Answer(200, "One page, newest first", list_of("Event")),),
        codes=("not_found",),
        parameters=(
            OF_TENANT,
            *SPAN,
            Parameter("action", "query", {"type": "string", "enum": sorted(ACTIONS)}),
            *(Parameter(name, "query", _WORD) for name in ("actor", "subject", "key_id", "request_id")),
            *PAGE,
        ),
    ),
    Operation(
        method="get",
        path="/api/v1/fleet",
        name="listEngines",
        tag="reports",
        summary="List the engines, and where they are not as they should be; for platform keys",
        answers=(Answer(200, "All engines", ref("FleetReport")),),
    ),
)
