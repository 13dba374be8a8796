"""`loraplex tenants`: create, list, show, update, delete."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from loraplex.cli.confirm import Yes, confirm
from loraplex.cli.output import AsJson, done, print_facts, print_json, print_table, when
from loraplex.cli.session import open_management
from loraplex.client.errors import ClientError

app = App(
    name="tenants",
    help="Create and change teams (needs an admin key).",
    help_format="plaintext",
    help_epilogue=(
        'Examples:\n\n  loraplex tenants create team-x --display-name "Team X"\n  loraplex tenants list --json\n'
    ),
)
Bases = Annotated[list[str] | None, Parameter(name="--base", negative=())]


@app.command
def create(name: str, /, *, display_name: str | None = None, bases: Bases = None, as_json: AsJson = False) -> None:
    """Create a tenant.

    Args:
        name: a-z, 0-9 and '-'; it is also its model name.
        display_name: For people.
        bases: A base it may use; repeat for more, none for all.
        as_json: Print JSON for programs.
    """
    with open_management() as client:
        tenant = client.create_tenant(name, display_name=display_name, bases=bases)
    if as_json:
        print_json(tenant)
    else:
        done(f"Tenant {tenant.name}. Next: loraplex keys create {tenant.name} --name app")


@app.command(name="list")
def list_(*, as_json: AsJson = False) -> None:
    """List the tenants that this key sees."""
    with open_management() as client:
        tenants = client.list_tenants()
    if as_json:
        print_json(tenants)
        return
    rows = (
        (t.name, t.display_name, t.state, "all" if t.bases is None else t.bases, when(t.created_at)) for t in tenants
    )
    print_table(
        "Tenants",
        ("name", "display name", "state", "bases", "created"),
        rows,
        empty="No tenants yet. Create one: loraplex tenants create team-x",
    )


@app.command
def show(name: str, /, *, as_json: AsJson = False) -> None:
    """Show one tenant and its adapters."""
    with open_management() as client:
        tenant = client.get_tenant(name)
        adapters = [] if as_json else client.list_adapters(name)
    if as_json:
        print_json(tenant)
        return
    print_facts(
        {
            "name": tenant.name,
            "display name": tenant.display_name,
            "state": tenant.state,
            "bases": "all" if tenant.bases is None else tenant.bases,
            "adapters": [adapter.name for adapter in adapters],
            "created": tenant.created_at,
        }
    )


@app.command
def update(
    name: str,
    /,
    *,
    display_name: str | None = None,
    state: Literal["active", "suspended"] | None = None,
    bases: Bases = None,
    all_bases: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> None:
    """Change a tenant; what is not named stays.

    Args:
        name: The tenant.
        display_name: For people; empty removes it.
        state: The keys of a suspended tenant answer 403.
        bases: A base it may use from now on; repeat for more.
        all_bases: Let it use every base again.
        as_json: Print JSON for programs.
    """
    changes: dict[str, object] = {}
    if display_name is not None:
        changes["display_name"] = display_name or None
    if state is not None:
        changes["state"] = state
    if bases is not None or all_bases:
        changes["bases"] = None if all_bases else bases
    with open_management() as client:
        tenant = client.update_tenant(name, changes)
    if as_json:
        print_json(tenant)
    else:
        done(f"Tenant {tenant.name} changed.")


@app.command
def delete(name: str, /, *, cascade: Annotated[bool, Parameter(negative=())] = False, is_sure: Yes = False) -> None:
    """Delete a tenant; its keys stop working at once, its name stays reserved for 30 days.

    Args:
        name: The tenant.
        cascade: Delete its adapters too.
        is_sure: Do not ask first.
    """
    if cascade:
        confirm(f"Delete {name} with its keys, its adapters and all their versions?", is_sure=is_sure)
    with open_management() as client:
        try:
            client.delete_tenant(name, cascade=cascade)
        except ClientError as error:
            raise _in_words_of_the_command(error) from error
    done(f"Tenant {name} deleted.")


def _in_words_of_the_command(error: ClientError) -> ClientError:
    """Return the API's refusal with the flag in the place of the query parameter."""
    message = error.message.replace("?cascade=true", "--cascade")
    return ClientError(message, status=error.status, code=error.code, param=error.param)
