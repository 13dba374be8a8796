"""`loraplex adapters push`: the names are judged here, the rest by the registry while bytes stream to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli.output import SHORT_DIGEST, AsJson, done, print_json, progress_bar, say
from loraplex.cli.report import describe_honoured, name_verdict
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import parse_ref
from loraplex.client.errors import ClientError
from loraplex.client.management import Management
from loraplex.client.upload import Upload
from loraplex_registry.wire.adapter import VersionView


def push(
    folder: Path,
    /,
    *,
    to: Annotated[str, Parameter(name="--as")],
    promote: Annotated[bool, Parameter(negative=())] = False,
    base: str | None = None,
    wait: int | None = None,
    as_json: AsJson = False,
) -> None:
    """Upload a folder that PEFT's save_pretrained wrote. It becomes live if nothing is live yet.

    Args:
        folder: The folder; what no adapter needs (optimizer states, logs, hidden files) stays here.
        to: TENANT (its default adapter, or one named default) or TENANT/ADAPTER.
        promote: Make it live as soon as it is ready.
        base: Judge it for this base whatever its config says (admin keys only).
        wait: Longest wait for the verdict, seconds.
        as_json: Print JSON for programs.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    from loraplex.client.upload import choose_files

    ref = parse_ref(to)
    if ref.which is not None:
        raise ClientError(
            f"Leave out @{ref.which}: the version's number is given by the registry.", code="invalid_name"
        )
    chosen = choose_files(folder)
    files = chosen.sent
    check_file_names(files)
    if not as_json:
        tell_left_out(chosen.left_out)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with open_management() as client, progress_bar(*columns) as progress:
        adapter = client.resolve_adapter(ref)
        task = progress.add_task(f"{ref.tenant}/{adapter}", total=sum(path.stat().st_size for path in files))
        upload = client.upload(
            ref.tenant,
            adapter,
            files,
            lambda count: progress.advance(task, count),
            promote="always" if promote else None,
            base=base,
            wait=wait,
        )
        is_default = upload.is_new and not as_json and became_default(client, upload.version)
    if as_json:
        print_json(upload.version)
    else:
        tell(upload, is_default=is_default)


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


def tell_left_out(names: list[str]) -> None:
    """Name the files of the folder that are not looked at."""
    if names:
        say(f"left out: {', '.join(names)}")


def became_default(client: Management, version: VersionView) -> bool:
    """Say whether this version made its adapter the team's default: the first one that went live does."""
    if not version.promoted or version.version != 1:
        return False
    try:
        return client.get_adapter(version.tenant, version.adapter).is_default
    except ClientError:
        # a key that may only upload is not told
        return False


def tell(upload: Upload, *, is_default: bool) -> None:
    """Say what a pushed version became and what to do next."""
    version = upload.version
    name = f"{version.tenant}/{version.adapter}@{version.version}"
    if upload.is_new:
        done(f"{name} is {version.state}, {version.digest[:SHORT_DIGEST]}")
    else:
        done(f"unchanged: same content as {name}, which is {version.state}, {version.digest[:SHORT_DIGEST]}")
    for check in version.report.checks:
        if name_verdict(check) == "note":
            say(f"  note, {check.name}: {check.message}")
        elif check.verdict == "warn":
            say(f"  warning, {check.name}: {check.message.partition(';')[0].rstrip('.')}.")
    if fields := describe_honoured(version.report.honoured):
        say(f"  in effect: {fields}")
    if is_default:
        say(f"  {version.adapter} is now the default adapter of {version.tenant}: model={version.tenant} means it.")
    if version.promoted:
        say(f'  live. Try it: loraplex chat --model {version.tenant}/{version.adapter} "Hello!"')
    elif version.state == "ready":
        say(f"  not live: another version is. Make it live: loraplex adapters promote {name}")
    else:
        say(f"  Look again: loraplex adapters show {name}")
