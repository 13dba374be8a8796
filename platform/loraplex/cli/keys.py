"""`loraplex keys`: create, list, revoke."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from loraplex.cli.output import AsJson, done, print_json, print_table, say, stdout, when
from loraplex.cli.session import open_management

app = App(
    name="keys",
    help="Create and revoke API keys.",
    help_format="plaintext",
    help_epilogue=(
        "Example:\n\n  loraplex keys create team-x --name app\n"
        "  loraplex keys create team-x --name ci --scope adapters:write --scope adapters:read\n"
    ),
)


@app.command
def create(
    tenant: str,
    /,
    *,
    name: str,
    owner: str | None = None,
    scopes: Annotated[list[str] | None, Parameter(name="--scope", negative=())] = None,
    role: Literal["admin", "admin_readonly"] | None = None,
    expires_at: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. Its text is printed now and never again, alone on standard output.

    Args:
        tenant: Whose key.
        name: What it is for.
        owner: Who answers for it.
        scopes: What it may do (infer if none is given); repeat for more.
        role: Makes a platform key, which sees all tenants.
        expires_at: When it ends, RFC 3339, as 2027-01-31T00:00:00Z.
        as_json: Print JSON for programs.
    """
    with open_management() as client:
        key = client.create_key(tenant, name, owner=owner, scopes=scopes, role=role, expires_at=expires_at)
    if as_json:
        print_json(key)
        return
    done(f"Key {key.id} of {tenant}, scopes: {', '.join(key.scopes) or '-'}. Keep it now, it is not shown again:")
    stdout().print(key.key, markup=False, soft_wrap=True)


@app.command(name="list")
def list_(tenant: str, /, *, as_json: AsJson = False) -> None:
    """List a tenant's keys, without their texts."""
    with open_management() as client:
        keys = client.list_keys(tenant)
    if as_json:
        print_json(keys)
        return
    print_table(
        f"Keys of {tenant}",
        ("id", "name", "owner", "role", "scopes", "created", "expires", "revoked"),
        (
            (k.id, k.name, k.owner, k.role, k.scopes, when(k.created_at), when(k.expires_at), when(k.revoked_at))
            for k in keys
        ),
        empty=f"No keys. Create one: loraplex keys create {tenant} --name app",
    )


@app.command
def revoke(tenant: str, key_id: str, /) -> None:
    """Revoke a key; requests with it are refused from now on."""
    with open_management() as client:
        client.revoke_key(tenant, key_id)
    done(f"Key {key_id} revoked.")
    say(f"What is left: loraplex keys list {tenant}")
