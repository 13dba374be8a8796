"""`loraplex tenants`: create, list, show, update, delete."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from loraplex.cli.confirm import Yes, confirm
from loraplex.cli.example import examples
from loraplex.cli.limit_flag import Limits, read_limits, show_limits
from loraplex.cli.output import AsJson, done, print_facts, print_json, print_table, when
from loraplex.cli.session import open_management
from loraplex.client.errors import ClientError

app = App(
    name="tenants",
    help="Create and change teams (needs an admin key).",
    help_format="plaintext",
    help_epilogue=examples('loraplex tenants create team-x --display-name "Team X"', "loraplex tenants list"),
)
Bases = Annotated[list[str] | None, Parameter(name="--base", negative=())]


@app.command(
    help_epilogue=examples(
        "loraplex tenants create team-x",
        "loraplex tenants create team-x --base smollm2-135m --limit tokens_per_minute=60000",
    )
)
def create(
    name: str,
    /,
    *,
    display_name: str | None = None,
    bases: Bases = None,
    limits: Limits = None,
    weight: int | None = None,
    as_json: AsJson = False,
) -> None:
    """Create a tenant: a team with keys, adapters, limits and usage of its own. Its next step is a key.

    Args:
        name: a-z, 0-9 and '-'; it is also its model name.
        display_name: For people.
        bases: A base it may use; repeat for more, none for all.
        limits: NAME=NUMBER of adapter_bytes (also as 10GiB), adapter_versions, adapter_rank, requests_per_minute,
            tokens_per_minute, concurrent_requests, tokens_per_day, tokens_per_month; repeat for more.
        weight: Its share of a busy engine, 1 to 1000 (1 if it is not given): twice the weight, twice the tokens.
        as_json: Print JSON for programs.
    """
    with open_management() as client:
        tenant = client.create_tenant(
            name, display_name=display_name, bases=bases, limits=read_limits(limits), weight=weight
        )
    if as_json:
        print_json(tenant)
    else:
        done(f"Tenant {tenant.name}. Next: loraplex keys create {tenant.name} --name app")


@app.command(name="list", help_epilogue=examples("loraplex tenants list", "loraplex tenants list --json"))
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


@app.command(help_epilogue=examples("loraplex tenants show team-x"))
def show(name: str, /, *, as_json: AsJson = False) -> None:
    """Show one tenant: its limits, its weight and its adapters.

    Args:
        name: The tenant.
        as_json: Print JSON for programs.
    """
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
            "limits": show_limits(tenant.limits or {}),
            "weight": tenant.weight,
            "adapters": [adapter.name for adapter in adapters],
            "created": tenant.created_at,
        }
    )


@app.command(
    help_epilogue=examples(
        "loraplex tenants update team-x --state suspended",
        "loraplex tenants update team-x --limit tokens_per_day=2000000 --limit requests_per_minute=none",
        "loraplex tenants update team-x --base smollm2-135m --weight 2",
    )
)
def update(
    name: str,
    /,
    *,
    display_name: str | None = None,
    state: Literal["active", "suspended"] | None = None,
    bases: Bases = None,
    all_bases: Annotated[bool, Parameter(negative=())] = False,
    limits: Limits = None,
    weight: int | None = None,
    as_json: AsJson = False,
) -> None:
    """Change a tenant; what is not named stays. It holds for the next request; running answers finish.

    Args:
        name: The tenant.
        display_name: For people; empty removes it.
        state: The keys of a suspended tenant answer 403, until it is active again.
        bases: A base it may use from now on, and no other but those that are named with it; repeat for more.
        all_bases: Let it use every base again.
        limits: NAME=NUMBER sets a limit and NAME=none removes it: adapter_bytes (also as 10GiB), adapter_versions,
            adapter_rank, requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day,
            tokens_per_month; repeat for more.
        weight: Its share of a busy engine, 1 to 1000: twice the weight, twice the tokens.
        as_json: Print JSON for programs.
    """
    changes: dict[str, object] = {}
    if display_name is not None:
        changes["display_name"] = display_name or None
    if state is not None:
        changes["state"] = state
    if bases is not None or all_bases:
        changes["bases"] = None if all_bases else bases
    if limits:
        changes["limits"] = read_limits(limits)
    if weight is not None:
        changes["weight"] = weight
    with open_management() as client:
        tenant = client.update_tenant(name, changes)
    if as_json:
        print_json(tenant)
    else:
        done(f"Tenant {tenant.name} changed.")


@app.command(help_epilogue=examples("loraplex tenants delete team-x", "loraplex tenants delete team-x --cascade"))
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
