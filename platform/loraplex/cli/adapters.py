"""`loraplex adapters`: upload, list, promote, roll back, retire, download; `check` needs no server.

Wherever a command takes NAME, it is TENANT (its default adapter) or TENANT/ADAPTER, and with @ a version's number.
"""

from __future__ import annotations

from cyclopts import App

from loraplex.cli.confirm import Yes, confirm
from loraplex.cli.example import examples
from loraplex.cli.output import (
    SHORT_DIGEST,
    AsJson,
    done,
    print_facts,
    print_json,
    print_table,
    show_targets,
    stdout,
    when,
)
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
    help_epilogue=examples(
        "loraplex adapters check ./my-adapter",
        "loraplex adapters push ./my-adapter --as team-x/support",
        "loraplex adapters promote team-x/support@2",
        "loraplex adapters rollback team-x/support",
    ),
)
_ELSEWHERE = (
    (
        "adapter_push:push",
        "Upload a folder that PEFT saved.",
        (
            "It becomes live if nothing is live yet, or with --promote. What is refused comes with a report; after a "
            "cut the same command goes on where it was."
        ),
        ("./my-adapter --as team-x", "./my-adapter --as team-x/support --promote"),
    ),
    (
        "adapter_check:check",
        "Judge a folder as the registry would, here.",
        "No server is asked; the base must be in this machine's cache. The exit code is 1 if it would be refused.",
        ("./my-adapter", "./my-adapter --base smollm2-135m --verbose"),
    ),
    (
        "adapter_pull:pull",
        "Download a version's files.",
        "They are what was uploaded, byte for byte. Needs the scope adapters:read.",
        ("team-x/support --to ./support", "team-x/support@3 --to ./support-3"),
    ),
    (
        "adapter_alias:alias",
        "Show, move or delete aliases.",
        (
            "An alias is a movable name, called as TENANT/ADAPTER@ALIAS; TENANT/ADAPTER alone means its alias live. "
            "Several versions may share its requests by percent."
        ),
        ("team-x/support", "team-x/support@blue --to 4", "team-x/support@live --to 3=90 --to 4=10"),
    ),
    (
        "adapter_alias:canary",
        "Give a version a share of the requests.",
        (
            "The version that has them now keeps the rest. Who gets the new one stays the same while its share grows; "
            "0 ends the canary, 100 promotes it."
        ),
        ("team-x/support@4 --share 10", "team-x/support@4 --share 0"),
    ),
    (
        "adapter_canary:outcomes",
        "Show how each version's requests ended.",
        "The last hour's, if no time is given, so that a canary can be judged.",
        ("team-x/support", "team-x/support@4 --from 2027-01-31T10:00:00Z --minutes"),
    ),
    (
        "adapter_limit:limit",
        "Limit the calls of an adapter.",
        "Whoever makes them; set by admins. Without --limit it shows what holds.",
        ("team-x/support", "team-x/support --limit requests_per_minute=600"),
    ),
    (
        "adapter_canary:warm",
        "Load a version on every engine ahead of requests.",
        "So that its first request does not wait. The exit code is 1 unless every engine of its base has it.",
        ("team-x/support@4",),
    ),
)
for _where, _summary, _details, _calls in _ELSEWHERE:
    _word = _where.partition(":")[2]
    app.command(
        f"loraplex.cli.{_where}",
        name=_word,
        help=f"{_summary}\n\n{_details}",
        help_epilogue=examples(*(f"loraplex adapters {_word} {call}" for call in _calls)),
    )


@app.command(name="list", help_epilogue=examples("loraplex adapters list", "loraplex adapters list team-x --json"))
def list_(tenant: str | None = None, /, *, as_json: AsJson = False) -> None:
    """List adapters: of one tenant, or of all that this key sees.

    Args:
        tenant: Whose; all that this key sees if it is not given.
        as_json: Print JSON for programs.
    """
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


@app.command(help_epilogue=examples("loraplex adapters show team-x/support", "loraplex adapters show team-x/support@2"))
def show(name: str, /, *, as_json: AsJson = False) -> None:
    """Show an adapter's versions, or one version with its report.

    Args:
        name: TENANT (its default adapter) or TENANT/ADAPTER; with @ a number, an alias or a digest that version.
        as_json: Print JSON for programs.
    """
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


@app.command(help_epilogue=examples("loraplex adapters promote team-x/support@2"))
def promote(name: str, /, *, as_json: AsJson = False) -> None:
    """Make a version live: from now on TENANT/ADAPTER means it. Running answers finish on the old one.

    Args:
        name: TENANT/ADAPTER@NUMBER; the version must be ready.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        moved = client.promote(ref.tenant, adapter, number)
    if as_json:
        print_json(moved.alias)
        return
    back = f" Back: loraplex adapters rollback {ref.tenant}/{adapter}" if moved.is_moved else ""
    done(f"{ref.tenant}/{adapter}@{number} is live.{back}")


@app.command(help_epilogue=examples("loraplex adapters rollback team-x/support"))
def rollback(name: str, /, *, as_json: AsJson = False) -> None:
    """Make live what was live before; a second one undoes the first.

    A full fine-tune that is not active any more is passed over. `history` shows what was live.

    Args:
        name: TENANT (its default adapter) or TENANT/ADAPTER; with @ALIAS another alias than live.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    which = ref.require_alias(LIVE)
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        found = client.roll_back(ref.tenant, adapter, which)
    if as_json:
        print_json(found)
        return
    full, what = f"{ref.tenant}/{adapter}", show_targets(found.targets)
    if which == LIVE:
        done(f"{full}@{what} is live again. Once more undoes it: loraplex adapters rollback {full}")
    else:
        done(f"{full}@{which} is {what} again. Once more undoes it: loraplex adapters rollback {full}@{which}")


@app.command(help_epilogue=examples("loraplex adapters history team-x/support"))
def history(name: str, /, *, as_json: AsJson = False) -> None:
    """Show every change of what was live, newest first, and who made it.

    Args:
        name: TENANT (its default adapter) or TENANT/ADAPTER; with @ALIAS another alias than live.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    which = ref.require_alias(LIVE)
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        changes = client.list_history(ref.tenant, adapter, which)
    if as_json:
        print_json(changes)
        return
    rows = (
        (change.revision, show_targets(change.targets), change.action, change.actor, when(change.created_at))
        for change in changes
    )
    print_table(
        f"History of {ref.tenant}/{adapter}@{which}",
        ("revision", "version", "what", "by", "when"),
        rows,
        empty=f"Nothing was ever {which}. Promote a version: loraplex adapters promote {ref.tenant}/{adapter}@1",
    )


@app.command(help_epilogue=examples("loraplex adapters retire team-x/support@1"))
def retire(name: str, /) -> None:
    """Retire a version: it answers 410 from now on; `restore` brings it back within 30 days.

    Args:
        name: TENANT/ADAPTER@NUMBER; no alias may point to it.
    """
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        client.retire(ref.tenant, adapter, number)
    done(f"{ref.tenant}/{adapter}@{number} retired. Back: loraplex adapters restore {ref.tenant}/{adapter}@{number}")


@app.command(help_epilogue=examples("loraplex adapters restore team-x/support@1"))
def restore(name: str, /, *, as_json: AsJson = False) -> None:
    """Make a retired version ready again; it does not become live by that.

    Args:
        name: TENANT/ADAPTER@NUMBER.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        version = client.restore(ref.tenant, client.resolve_adapter(ref), number)
    if as_json:
        print_json(version)
    else:
        done(f"{version.tenant}/{version.adapter}@{number} is {version.state}.")


@app.command(help_epilogue=examples("loraplex adapters quarantine team-x/support@2"))
def quarantine(name: str, /, *, as_json: AsJson = False) -> None:
    """Take a version out of service at once (admins): every name that means it answers 409.

    Args:
        name: TENANT/ADAPTER@NUMBER, whatever points to it.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        version = client.quarantine(ref.tenant, client.resolve_adapter(ref), number)
    if as_json:
        print_json(version)
    else:
        full = f"{version.tenant}/{version.adapter}@{number}"
        done(f"{full} is {version.state}. Back: loraplex adapters release {full}")


@app.command(help_epilogue=examples("loraplex adapters release team-x/support@2"))
def release(name: str, /, *, as_json: AsJson = False) -> None:
    """Make a quarantined version ready again (admins); engines forget what they had against it and load it anew.

    Args:
        name: TENANT/ADAPTER@NUMBER.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        version = client.release(ref.tenant, client.resolve_adapter(ref), number)
    if as_json:
        print_json(version)
    else:
        done(f"{version.tenant}/{version.adapter}@{number} is {version.state}.")


@app.command(help_epilogue=examples("loraplex adapters delete team-x/support"))
def delete(name: str, /, *, is_sure: Yes = False) -> None:
    """Delete an adapter with all its versions; running answers finish. This cannot be undone.

    Args:
        name: The whole name, TENANT/ADAPTER.
        is_sure: Do not ask first.
    """
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
    """The live version, and what of it or of the newest one is not as a reader would think."""
    if adapter.live is not None and adapter.live_state not in (None, "ready"):
        return f"{adapter.live}, {adapter.live_state}"
    newest = "quarantined" if adapter.latest_state == "quarantined" else None
    if adapter.live is None or newest is None:
        return newest if adapter.live is None else str(adapter.live)
    return f"{adapter.live} ({adapter.latest} {newest})"


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
