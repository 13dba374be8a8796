"""`loraplex keys`: create, list, update, rotate, revoke."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from loraplex.cli.example import examples
from loraplex.cli.limit_flag import Limits, read_limits, show_limits
from loraplex.cli.output import AsJson, done, print_json, print_table, say, stdout, when
from loraplex.cli.session import open_management
from loraplex.client.types import Key

_TENANT_ROLE = "tenant"

app = App(
    name="keys",
    help="Create, limit, rotate and revoke API keys.",
    help_format="plaintext",
    help_epilogue=examples(
        "loraplex keys create team-x --name app",
        "loraplex keys list team-x",
        "loraplex keys rotate team-x KEY_ID --overlap-s 3600",
    ),
)


@app.command(
    help_epilogue=examples(
        "loraplex keys create team-x --name app",
        "loraplex keys create team-x --name ci --scope adapters:write",
        "loraplex keys create team-x --name batch --limit tokens_per_minute=6000 --priority 4",
        "loraplex tenants create ops && loraplex keys create ops --name grace --owner grace --role admin",
    )
)
def create(
    tenant: str,
    /,
    *,
    name: str,
    owner: str | None = None,
    scopes: Annotated[list[str] | None, Parameter(name="--scope", negative=())] = None,
    role: Literal["admin", "admin_readonly"] | None = None,
    expires_at: str | None = None,
    limits: Limits = None,
    priority: int | None = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. Its text is printed now and never again, alone on standard output.

    Args:
        tenant: Whose key.
        name: What it is for.
        owner: Who answers for it.
        scopes: What it may do (infer if none is given): infer, adapters:read, adapters:write, usage:read, keys:write,
            escalations:write, metrics:read, audit:read; repeat for more.
        role: Makes a platform key in place of one with scopes: admin may do everything in all tenants, admin_readonly
            look at it. Like any key it stands under a tenant, by which it is listed, rotated and revoked; what it may
            do does not depend on which, so take one of your own, as ops.
        expires_at: When it ends, RFC 3339, as 2027-01-31T00:00:00Z.
        limits: NAME=NUMBER of requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day,
            tokens_per_month, beside those of the team; repeat for more.
        priority: Whose requests go first within the team: -8 (first; given by admins only) to 8 (last), 0 as a rule.
        as_json: Print JSON for programs.
    """
    with open_management() as client:
        key = client.create_key(
            tenant,
            name,
            owner=owner,
            scopes=scopes,
            role=role,
            expires_at=expires_at,
            limits=read_limits(limits),
            priority=priority,
        )
    _print_new(key, f"Key {key.id} of {tenant}, {_show_rights(key)}.", as_json=as_json)


@app.command(name="list", help_epilogue=examples("loraplex keys list team-x"))
def list_(tenant: str, /, *, as_json: AsJson = False) -> None:
    """List a tenant's keys, without their texts: what they may do, and when each was last used.

    Args:
        tenant: Whose keys.
        as_json: Print JSON for programs.
    """
    with open_management() as client:
        keys = client.list_keys(tenant)
    if as_json:
        print_json(keys)
        return
    print_table(
        f"Keys of {tenant}",
        ("id", "name", "owner", "role", "scopes", "limits", "priority", "created", "last used", "expires", "revoked"),
        (_row(key) for key in keys),
        empty=f"No keys. Create one: loraplex keys create {tenant} --name app",
    )


@app.command(
    help_epilogue=examples(
        "loraplex keys update team-x KEY_ID --limit tokens_per_minute=6000",
        "loraplex keys update team-x KEY_ID --limit tokens_per_minute=none --priority 4",
    )
)
def update(
    tenant: str,
    key_id: str,
    /,
    *,
    limits: Limits = None,
    priority: int | None = None,
    as_json: AsJson = False,
) -> None:
    """Change how much a key may take, from its next request on; what is not named stays.

    What it may do is not changed: create another key with other scopes, and revoke this one.

    Args:
        tenant: Whose key.
        key_id: As `keys list` shows it.
        limits: NAME=NUMBER sets a limit and NAME=none removes it: requests_per_minute, tokens_per_minute,
            concurrent_requests, tokens_per_day, tokens_per_month; repeat for more.
        priority: Whose requests go first within the team: -8 (first; given by admins only) to 8 (last).
        as_json: Print JSON for programs.
    """
    changes: dict[str, object] = {}
    if limits:
        changes["limits"] = read_limits(limits)
    if priority is not None:
        changes["priority"] = priority
    with open_management() as client:
        key = client.update_key(tenant, key_id, changes)
    if as_json:
        print_json(key)
    else:
        done(f"Key {key.id} changed.")


@app.command(
    help_epilogue=examples(
        "loraplex keys rotate team-x KEY_ID",
        "loraplex keys rotate team-x KEY_ID --overlap-s 3600 --expires-at 2027-12-31T00:00:00Z",
    )
)
def rotate(
    tenant: str,
    key_id: str,
    /,
    *,
    overlap_s: int | None = None,
    expires_at: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key by a new one with the same rights; both work until the overlap is over.

    Args:
        tenant: Whose key.
        key_id: The key to replace, as `keys list` shows it.
        overlap_s: Seconds that the old key still works (a day if it is not given); 0 ends it at once.
        expires_at: When the new key ends, RFC 3339; else when the old one would have.
        as_json: Print JSON for programs.
    """
    with open_management() as client:
        key = client.rotate_key(tenant, key_id, overlap_s=overlap_s, expires_at=expires_at)
    _print_new(key, f"Key {key.id} of {tenant}, {_show_rights(key)}, replaces {key_id}.", as_json=as_json)


@app.command(help_epilogue=examples("loraplex keys revoke team-x KEY_ID"))
def revoke(tenant: str, key_id: str, /) -> None:
    """Revoke a key: requests with it are refused from now on. This cannot be undone.

    Args:
        tenant: Whose key.
        key_id: As `keys list` shows it.
    """
    with open_management() as client:
        client.revoke_key(tenant, key_id)
    done(f"Key {key_id} revoked.")
    say(f"What is left: loraplex keys list {tenant}")


def _show_rights(key: Key) -> str:
    """A platform key has a role in place of scopes."""
    if key.role == _TENANT_ROLE:
        return f"scopes: {', '.join(key.scopes) or '-'}"
    return f"role: {key.role} (it acts for the whole platform, not for this team alone)"


def _print_new(key: Key, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(key)
        return
    done(f"{what} Keep it now, it is not shown again:")
    stdout().print(key.key, markup=False, soft_wrap=True)


def _row(key: Key) -> tuple[object, ...]:
    return (
        key.id,
        key.name,
        key.owner,
        key.role,
        key.scopes,
        show_limits(key.limits),
        key.priority,
        when(key.created_at),
        when(key.last_used_at),
        when(key.expires_at),
        when(key.revoked_at),
    )
