"""`loraplex adapters pull`: the files of one version, byte for byte as they were uploaded."""

from __future__ import annotations

from pathlib import Path

from loraplex.cli.output import done, stderr
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import parse_ref


def pull(name: str, /, *, to: Path | None = None) -> None:
    """Download a version's files into a folder.

    Args:
        name: TENANT/ADAPTER for the live version, or with @ a number, an alias or a digest.
        to: The folder; default is the adapter's name, here.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    ref = parse_ref(name)
    with open_management() as client, Progress(*columns, console=stderr(), transient=True) as progress:
        version = client.resolve_version(ref)
        folder = to or Path(version.adapter)
        folder.mkdir(parents=True, exist_ok=True)
        task = progress.add_task(version.adapter, total=version.size_bytes)
        names = client.download_all(version, folder, lambda count: progress.advance(task, count))
    done(f"{version.tenant}/{version.adapter}@{version.version}: {', '.join(names)} in {folder}")
