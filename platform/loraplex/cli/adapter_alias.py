"""`loraplex adapters alias` and `canary`: which versions a name means, and in which shares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli.confirm import Yes, confirm
from loraplex.cli.output import AsJson, done, print_json, print_table, say, show_targets, when
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import parse_ref
from loraplex.client.errors import ClientError
from loraplex.client.management import LIVE
from loraplex.client.types import MovedAlias
from loraplex_registry.wire.adapter import Target

_WHOLE = 100
_TARGET = re.compile(r"([1-9][0-9]{0,8})(?:=([1-9][0-9]?|100))?", re.ASCII)


def alias(
    name: str,
    /,
    *,
    to: Annotated[list[str] | None, Parameter(name="--to", negative=())] = None,
    revision: int | None = None,
    is_deleted: Annotated[bool, Parameter(name="--delete", negative=())] = False,
    is_sure: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show the aliases of TENANT/ADAPTER; with @ALIAS show, move or delete that one.

    Args:
        name: TENANT/ADAPTER or TENANT/ADAPTER@ALIAS.
        to: Version it means from now on, or VERSION=PERCENT; repeat for more, up to 100 percent in all.
        revision: Move it only if it is at this revision; 0 if it must not exist.
        is_deleted: Delete the alias; its history stays.
        is_sure: Do not ask first.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    changes = bool(to) or is_deleted
    if ref.which is None and (changes or revision is not None):
        raise ClientError("Say which alias, as in team-x/support@live.", code="invalid_name")
    if to and is_deleted:
        raise ClientError("Give --to or --delete, not both.", code="invalid_request_error")
    targets = _read_targets(to or [])
    which = ref.require_alias(LIVE)
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        full = f"{ref.tenant}/{adapter}@{which}"
        if is_deleted:
            confirm(f"Delete the alias {full}?", is_sure=is_sure)
            client.delete_alias(ref.tenant, adapter, which)
            done(f"{full} deleted.")
            return
        way_back = ""
        if targets:
            moved = client.set_alias(ref.tenant, adapter, which, targets, revision)
            found, way_back = [moved.alias], _find_way_back(moved, full)
        elif ref.which is not None:
            found = [client.get_alias(ref.tenant, adapter, which)]
        else:
            found = client.list_aliases(ref.tenant, adapter)
    if as_json:
        print_json(found[0] if ref.which is not None else found)
    elif targets:
        done(f"{full} is {show_targets(found[0].targets)}.{way_back}")
    else:
        print_table(
            f"Aliases of {ref.tenant}/{adapter}",
            ("alias", "version", "revision", "moved"),
            ((one.alias, show_targets(one.targets), one.revision, when(one.updated_at)) for one in found),
            empty=f"No aliases. Promote a version: loraplex adapters promote {ref.tenant}/{adapter}@1",
        )


def canary(
    name: str,
    /,
    *,
    share: int,
    to: Annotated[str, Parameter(name="--alias")] = LIVE,
    as_json: AsJson = False,
) -> None:
    """Give a version a share of the requests to `live`: `canary team-x/support@4 --share 10`.

    Who gets it stays the same while the share grows; 0 ends the canary, 100 promotes it.

    Args:
        name: TENANT/ADAPTER@NUMBER.
        share: Percent, 0 to 100.
        to: Another alias than live.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    number = ref.require_number()
    if not 0 <= share <= _WHOLE:
        raise ClientError("The share is 0 to 100 percent.", code="invalid_request_error", param="share")
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        before = client.get_alias(ref.tenant, adapter, to)
        targets = share_out(before.targets, number, share)
        after = client.set_alias(ref.tenant, adapter, to, targets, before.revision).alias
    full = f"{ref.tenant}/{adapter}"
    if as_json:
        print_json(after)
        return
    way_back = _find_way_back(MovedAlias(after, is_new=False, before=before), f"{full}@{to}")
    done(f"{full}@{to} is {show_targets(after.targets)}.{way_back}")
    if len(after.targets) > 1:
        say(f"How it does: loraplex adapters outcomes {full}")


def share_out(targets: Sequence[Target], number: int, share: int) -> list[Target]:
    """Return `targets` with version `number` at `share` percent, and the one other version at the rest.

    Raises:
        ClientError: There are several others, or none that could take the rest.
    """
    others = [target.version for target in targets if target.version != number]
    if share == _WHOLE:
        return [Target(number, _WHOLE)]
    if not others:
        raise ClientError(
            f"Version {number} is all of it already; name another version, or promote one.",
            code="conflict",
            param="share",
        )
    if len(others) > 1:
        shares = " ".join(f"--to {target.version}={target.weight}" for target in targets)
        raise ClientError(
            f"Versions {', '.join(map(str, others))} share the rest; say all shares: loraplex adapters alias ... "
            f"{shares}",
            code="conflict",
            param="share",
        )
    rest = [Target(others[0], _WHOLE - share)]
    return sorted([*rest, Target(number, share)], key=lambda target: target.version) if share else rest


def _find_way_back(moved: MovedAlias, full: str) -> str:
    """Return how to undo a move, nothing where nothing has moved."""
    if moved.is_new:
        return f" Remove it: loraplex adapters alias {full} --delete"
    return f" Back: loraplex adapters rollback {full}" if moved.is_moved else ""


def _read_targets(texts: Sequence[str]) -> list[Target]:
    """Return VERSION or VERSION=PERCENT as targets.

    Raises:
        ClientError: One is neither, or they do not make a whole.
    """
    targets = []
    for text in texts:
        found = _TARGET.fullmatch(text)
        if found is None or (found[2] is None and len(texts) > 1):
            raise ClientError(
                f"{text!r} is not VERSION=PERCENT; a single version may be named alone.",
                code="invalid_request_error",
                param="to",
            )
        targets.append(Target(int(found[1]), int(found[2] or _WHOLE)))
    if targets and sum(target.weight for target in targets) != _WHOLE:
        raise ClientError("The shares must make 100 percent.", code="invalid_request_error", param="to")
    return targets
