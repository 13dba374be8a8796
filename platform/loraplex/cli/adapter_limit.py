"""`loraplex adapters limit`: how much of an adapter may be called."""

from __future__ import annotations

from loraplex.cli.limit_flag import Limits, read_limits, show_limits
from loraplex.cli.output import AsJson, done, print_facts, print_json
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import parse_ref
from loraplex.client.errors import ClientError


def limit(name: str, /, *, limits: Limits = None, as_json: AsJson = False) -> None:
    """Limit the calls of an adapter, whoever makes them (admins); without --limit show what holds.

    Args:
        name: TENANT (its default adapter) or TENANT/ADAPTER.
        limits: NAME=NUMBER of requests_per_minute, tokens_per_minute, concurrent_requests, tokens_per_day,
            tokens_per_month, or NAME=none; repeat for more.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    if ref.which is not None:
        raise ClientError(f"Leave out @{ref.which}: limits are the adapter's, not a version's.", code="invalid_name")
    wanted = read_limits(limits)
    with open_management() as client:
        own = client.resolve_adapter(ref)
        if wanted is None:
            adapter = client.get_adapter(ref.tenant, own)
        else:
            adapter = client.update_adapter(ref.tenant, own, {"limits": wanted})
    if as_json:
        print_json(adapter)
        return
    print_facts({"adapter": f"{adapter.tenant}/{adapter.name}", "limits": show_limits(adapter.limits)})
    if wanted is not None:
        done(f"{adapter.tenant}/{adapter.name} changed.")
