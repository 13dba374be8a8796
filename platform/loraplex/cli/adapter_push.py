"""`loraplex adapters push`: the names are judged here, the rest by the registry.

A small folder is one request; a large one goes in parts, which a later run of the same command goes on with.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli.output import AsJson, print_json, say
from loraplex.cli.pushed import became_default, check_outcome, tell
from loraplex.cli.session import open_management
from loraplex.cli.upload_bar import UploadBar
from loraplex.client.adapter_name import parse_ref
from loraplex.client.errors import ClientError, ConnectionFailedError
from loraplex.client.large_upload import LargeUpload, send_in_parts
from loraplex.client.management import Management
from loraplex.client.upload import Upload, choose_files
from loraplex.client.upload_memory import UploadMemory
from loraplex_registry.wire.adapter import VersionView
from loraplex_registry.wire.setting import read_settings

MAX_SMALL_BYTES = 64 << 20
"""A folder with more goes in parts."""
_WAIT_S = 120
"""How long a verdict is waited for where nobody says; beside it the server has its own bound for each answer."""
_POLL_S = 0.5


def push(
    folder: Path,
    /,
    *,
    to: Annotated[str, Parameter(name="--as")],
    promote: Annotated[bool, Parameter(negative=())] = False,
    base: str | None = None,
    wait: int | None = None,
    resumable: Annotated[bool, Parameter(negative=())] = False,
    no_resume: Annotated[bool, Parameter(name="--no-resume", negative=())] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a folder that PEFT's save_pretrained wrote. It becomes live if nothing is live yet.

    Args:
        folder: The folder; what no adapter needs (optimizer states, logs, hidden files) stays here.
        to: TENANT (its default adapter, or one named default) or TENANT/ADAPTER.
        promote: Make it live as soon as it is ready.
        base: Judge it for this base whatever its config says (admin keys only).
        wait: Longest wait for the verdict, seconds. Default 120.
        resumable: Send it in parts, as more than 64 MiB always are: a cut loses little.
        no_resume: Begin anew instead of going on with what an earlier run has sent.
        as_json: Print JSON for programs.
    """
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
    options = {name: value for name, value in (("promote", "always" if promote else None), ("base", base)) if value}
    with open_management() as client:
        order = LargeUpload(ref.tenant, client.resolve_adapter(ref), files, options, wait, resumes=not no_resume)
        with UploadBar(f"{ref.tenant}/{order.adapter}", is_silent=as_json) as bar:
            total = sum(path.stat().st_size for path in files)
            is_large = resumable or total > MAX_SMALL_BYTES
            upload = _send_in_parts(client, order, bar) if is_large else _send_whole(client, order, bar, total)
            upload = Upload(_wait_for_verdict(client, upload.version, wait or _WAIT_S, bar), upload.is_new)
        is_default = upload.is_new and not as_json and became_default(client, upload.version)
    if as_json:
        print_json(upload.version)
    else:
        tell(upload, is_default=is_default)
    check_outcome(upload.version)


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


def _send_whole(client: Management, order: LargeUpload, bar: UploadBar, total: int) -> Upload:
    bar.sending("", total, 0)
    return client.upload(order.tenant, order.adapter, list(order.files), bar.advance, wait=order.wait, **order.options)


def _send_in_parts(client: Management, order: LargeUpload, bar: UploadBar) -> Upload:
    """Send in parts, and where that is cut say how to go on."""
    memory = UploadMemory(Path(read_settings(os.environ, "client")["cache_dir"]).expanduser())
    try:
        return send_in_parts(client.connection, order, memory, bar)
    except (KeyboardInterrupt, ConnectionFailedError):
        if bar.upload is not None and not bar.is_silent:
            say(f"{bar.upload} was cut; what has arrived is kept for a day. Push again in the same way to go on.")
        raise


def _wait_for_verdict(client: Management, version: VersionView, wait_s: float, bar: UploadBar) -> VersionView:
    """Return the version as it is when it is judged, or when the time is over."""
    deadline = time.monotonic() + wait_s
    while version.state == "validating" and time.monotonic() < deadline:
        bar.waiting(version.state)
        time.sleep(_POLL_S)
        try:
            version = client.get_version(version.tenant, version.adapter, version.version)
        except ClientError as error:
            # a key that may only upload is not told
            if error.code == "permission_denied":
                break
            raise
    return version
