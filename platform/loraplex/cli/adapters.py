"""`loraplex adapters`: upload, list, promote, roll back, retire, download; `check` needs no server.

Wherever a command takes NAME, it is TENANT (its default adapter) or TENANT/ADAPTER, and with @ a version's number.
"""

from __future__ import annotations

from cyclopts import App

from loraplex.cli.confirm import Yes, confirm
from loraplex.cli.output import SHORT_DIGEST, AsJson, done, print_facts, print_json, print_table, stdout, when
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import DEFAULT_NAME, AdapterRef, parse_ref
from loraplex.client.errors import ClientError
from loraplex.client.management import LIVE
from loraplex.client.types import Adapter
from loraplex_registry.wire.adapter import VersionView

app = App(
    name="adapters",
    help="Upload, promote, roll back and retire adapters.",
    help_format="plaintext",
    help_epilogue=(
        "Examples:\n\n"
        "  loraplex adapters check ./my-adapter\n"
        "  loraplex adapters push ./my-adapter --as team-x/support\n"
        "  loraplex adapters promote team-x/support@2\n"
        "  loraplex adapters rollback team-x/support\n"
    ),
)
app.command("loraplex.cli.adapter_push:push", name="push", help="Upload a folder that PEFT saved.")
app.command("loraplex.cli.adapter_check:check", name="check", help="Judge a folder as the registry would, here.")
app.command("loraplex.cli.adapter_pull:pull", name="pull", help="Download a version's files.")


@app.command(name="list")
def list_(tenant: str | None = None, /, *, as_json: AsJson = False) -> None:
    """List adapters: of one tenant, or of all that this key sees."""
    with open_management() as client:
        tenants = [tenant] if tenant else [found.name for found in client.list_tenants()]
        adapters = [adapter for name in tenants for adapter in client.list_adapters(name)]
    if as_json:
        print_json(adapters)
        return
    print_table(
        "Adapters",
        ("adapter", "default", "live", "versions", "base", "created"),
        (
            (f"{a.tenant}/{a.name}", a.is_default, _show_live(a), a.num_versions, a.base_model, when(a.created_at))
            for a in adapters
        ),
        empty="No adapters yet. Upload one: loraplex adapters push ./my-adapter --as team-x",
    )


@app.command
def show(name: str, /, *, as_json: AsJson = False) -> None:
    """Show an adapter's versions, or one version with its report."""
    ref = parse_ref(name)
    if ref.which is not None:
        with open_management() as client:
            _show_version(client.resolve_version(ref), as_json=as_json)
        return
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        versions = client.list_versions(ref.tenant, adapter)
    if as_json:
        print_json(versions)
        return
    print_table(
        f"Versions of {ref.tenant}/{adapter}",
        ("version", "live", "state", "digest", "rank", "modules", "size", "created"),
        (_row(version) for version in versions),
        empty=f"No versions. Upload one: loraplex adapters push ./my-adapter --as {ref.tenant}/{adapter}",
    )


@app.command
def promote(name: str, /, *, as_json: AsJson = False) -> None:
    """Make a version live: `promote team-x/support@2`. Running answers finish on the old one."""
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        alias = client.promote(ref.tenant, adapter, number)
    if as_json:
        print_json(alias)
    else:
        done(f"{ref.tenant}/{adapter}@{number} is live. Back: loraplex adapters rollback {ref.tenant}/{adapter}")


@app.command
def rollback(name: str, /, *, as_json: AsJson = False) -> None:
    """Make live what was live before the last change; a second rollback undoes the first."""
    ref = _without_version(name)
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        alias = client.roll_back(ref.tenant, adapter)
    if as_json:
        print_json(alias)
    else:
        done(
            f"{ref.tenant}/{adapter}@{alias.targets[0].version} is live again. Once more undoes it: "
            f"loraplex adapters rollback {ref.tenant}/{adapter}"
        )


@app.command
def history(name: str, /, *, as_json: AsJson = False) -> None:
    """Show every change of what was live, newest first."""
    ref = _without_version(name)
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        changes = client.list_history(ref.tenant, adapter)
    if as_json:
        print_json(changes)
        return
    rows = (
        (change.revision, [target.version for target in change.targets], change.actor, when(change.created_at))
        for change in changes
    )
    print_table(
        f"History of {ref.tenant}/{adapter}@{LIVE}",
        ("revision", "version", "by", "when"),
        rows,
        empty=f"Nothing was ever live. Promote a version: loraplex adapters promote {ref.tenant}/{adapter}@1",
    )


@app.command
def retire(name: str, /) -> None:
    """Retire a version: it answers 410 from now on; `restore` brings it back within 30 days."""
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        client.retire(ref.tenant, adapter, number)
    done(f"{ref.tenant}/{adapter}@{number} retired. Back: loraplex adapters restore {ref.tenant}/{adapter}@{number}")


@app.command
def restore(name: str, /, *, as_json: AsJson = False) -> None:
    """Make a retired version ready again; it does not become live by that."""
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        version = client.restore(ref.tenant, client.resolve_adapter(ref), number)
    if as_json:
        print_json(version)
    else:
        done(f"{version.tenant}/{version.adapter}@{number} is {version.state}.")


@app.command
def quarantine(name: str, /, *, as_json: AsJson = False) -> None:
    """Take a version out of service at once (admins): every name that means it answers 409."""
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        version = client.quarantine(ref.tenant, client.resolve_adapter(ref), number)
    if as_json:
        print_json(version)
    else:
        full = f"{version.tenant}/{version.adapter}@{number}"
        done(f"{full} is {version.state}. Back: loraplex adapters release {full}")


@app.command
def release(name: str, /, *, as_json: AsJson = False) -> None:
    """Make a quarantined version ready again (admins); engines forget what they had against it and load it anew."""
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        version = client.release(ref.tenant, client.resolve_adapter(ref), number)
    if as_json:
        print_json(version)
    else:
        done(f"{version.tenant}/{version.adapter}@{number} is {version.state}.")


@app.command
def delete(name: str, /, *, is_sure: Yes = False) -> None:
    """Delete an adapter with all its versions; running answers finish. Say the whole name, TENANT/ADAPTER."""
    ref = _without_version(name)
    if ref.adapter is None:
        raise ClientError(
            f"Say the whole name of the adapter to delete, as in {ref.tenant}/{DEFAULT_NAME}; the team itself is "
            "deleted with `loraplex tenants delete`.",
            code="invalid_name",
        )
    confirm(f"Delete {name} with all its versions?", is_sure=is_sure)
    with open_management() as client:
        client.delete_adapter(ref.tenant, ref.adapter)
    done(f"{name} deleted.")


def _without_version(name: str) -> AdapterRef:
    ref = parse_ref(name)
    if ref.which is not None:
        raise ClientError(f"Leave out @{ref.which}: this is about the adapter, not one version.", code="invalid_name")
    return ref


def _show_live(adapter: Adapter) -> str | None:
    if adapter.live is None:
        return None
    return str(adapter.live) if adapter.live_state in (None, "ready") else f"{adapter.live}, {adapter.live_state}"


def _show_state(version: VersionView) -> str:
    return version.state if version.quarantine is None else f"{version.state} ({version.quarantine.reason})"


def _row(version: VersionView) -> tuple[object, ...]:
    return (
        version.version,
        "live" if version.promoted else "",
        _show_state(version),
        version.digest[:SHORT_DIGEST],
        version.rank,
        version.target_modules,
        f"{version.size_bytes / 1e6:.2f} MB",
        when(version.created_at),
    )


def _show_version(version: VersionView, *, as_json: bool) -> None:
    if as_json:
        print_json(version)
        return
    from loraplex.cli.report import print_report

    quarantine = version.quarantine
    why = {} if quarantine is None else {"because": quarantine.message, "since": quarantine.since}
    print_facts(
        {
            "version": f"{version.tenant}/{version.adapter}@{version.version}",
            "state": _show_state(version),
            **why,
            "live": version.promoted,
            "digest": version.digest,
            "base": version.base_model,
            "rank": version.rank,
            "modules": version.target_modules,
            "parameters": f"{version.num_parameters:,}",
            "size": f"{version.size_bytes:,} bytes",
            "created": f"{version.created_at} by {version.created_by}",
        }
    )
    print_report(stdout(), version.report)
