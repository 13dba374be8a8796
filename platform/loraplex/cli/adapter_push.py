"""`loraplex adapters push`: the names are judged here, the rest by the registry while bytes stream to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli.adapters import SHORT_DIGEST
from loraplex.cli.output import AsJson, done, print_json, say, stderr
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import parse_ref
from loraplex.client.errors import ClientError
from loraplex_registry.wire.adapter import VersionView

_NEVER_NEWS = "parity"
"""Warned of at every upload as long as no replica compares; `adapters show` has it."""


def push(
    folder: Path,
    /,
    *,
    to: Annotated[str, Parameter(name="--as")],
    promote: Annotated[bool, Parameter(negative=())] = False,
    base: str | None = None,
    wait: float | None = None,
    as_json: AsJson = False,
) -> None:
    """Upload a folder that PEFT's save_pretrained wrote. It becomes live if nothing is live yet.

    Args:
        folder: The folder; hidden files stay here.
        to: TENANT (its default adapter, or one named default) or TENANT/ADAPTER.
        promote: Make it live as soon as it is ready.
        base: Judge it for this base whatever its config says (admin keys only).
        wait: Longest wait for the verdict, seconds.
        as_json: Print JSON for programs.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from loraplex.client.upload import list_files

    ref = parse_ref(to)
    if ref.which is not None:
        raise ClientError(
            f"Leave out @{ref.which}: the version's number is given by the registry.", code="invalid_name"
        )
    files = list_files(folder)
    check_file_names(files)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with open_management() as client, Progress(*columns, console=stderr(), transient=True) as progress:
        adapter = client.resolve_adapter(ref)
        task = progress.add_task(f"{ref.tenant}/{adapter}", total=sum(path.stat().st_size for path in files))
        version = client.push(
            ref.tenant,
            adapter,
            files,
            lambda count: progress.advance(task, count),
            promote="always" if promote else None,
            base=base,
            wait=wait,
        )
    if as_json:
        print_json(version)
    else:
        tell(version)


def check_file_names(files: list[Path]) -> None:
    """Refuse a folder whose file names the registry would refuse, before bytes are sent.

    Raises:
        ClientError: It would; the report says why.
    """
    from loraplex_registry.peft.check import check_names
    from loraplex_registry.peft.report import build_report

    report = build_report(check_names([path.name for path in files]))
    failure = report.first_failure
    if failure:
        raise ClientError(failure.message, code="adapter_rejected", param=failure.subject or None, report=report)


def tell(version: VersionView) -> None:
    """Say what a pushed version became and what to do next."""
    name = f"{version.tenant}/{version.adapter}@{version.version}"
    done(f"{name} is {version.state}, {version.digest[:SHORT_DIGEST]}")
    for check in version.report.checks:
        if check.verdict == "warn" and check.name != _NEVER_NEWS:
            say(f"  warning, {check.name}: {check.message}")
    if version.promoted:
        say(f'  live. Try it: loraplex chat --model {version.tenant}/{version.adapter} "Hello!"')
    elif version.state == "ready":
        say(f"  not live: another version is. Make it live: loraplex adapters promote {name}")
    else:
        say(f"  Look again: loraplex adapters show {name}")
