"""`loraplex adapters pull`: the files of one version, byte for byte as they were uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli.output import done, progress_bar
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import parse_ref
from loraplex.client.errors import ClientError
from loraplex.client.upload import OPTIONAL_FILES, REQUIRED_FILES
from loraplex_registry.wire.adapter import VersionView


def pull(name: str, /, *, to: Path | None = None, force: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Download a version's files into a folder.

    Args:
        name: TENANT/ADAPTER for the live version, or with @ a number, an alias or a digest.
        to: The folder; default is the adapter's name, here.
        force: Write over files that lie there.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    ref = parse_ref(name)
    with open_management() as client, progress_bar(*columns) as progress:
        version = client.resolve_version(ref)
        check_has_files(version)
        folder = to or Path(version.adapter)
        if not force:
            check_free(folder)
        folder.mkdir(parents=True, exist_ok=True)
        task = progress.add_task(version.adapter, total=version.size_bytes)
        names = client.download_all(version, folder, lambda count: progress.advance(task, count))
    done(f"{version.tenant}/{version.adapter}@{version.version}: {', '.join(names)} in {folder}")


def check_has_files(version: VersionView) -> None:
    """Return if the registry keeps the files of a version.

    Raises:
        ClientError: It is a full fine-tune.
    """
    if version.kind == "full":
        name = f"{version.tenant}/{version.adapter}"
        raise ClientError(
            f"{name}@{version.version} is a full fine-tune: the platform keeps no files of it, whoever runs its pool "
            f"{version.pool} has them. Adapters among the versions: loraplex adapters show {name}",
            code="not_found",
            param="name",
        )


def check_free(folder: Path) -> None:
    """Return if a download into `folder` writes over nothing.

    Raises:
        ClientError: A file of an adapter lies there.
    """
    taken = [name for name in (*REQUIRED_FILES, *OPTIONAL_FILES) if (folder / name).exists()]
    if taken:
        raise ClientError(
            f"{folder} holds {', '.join(taken)} already. Choose another folder with --to, or write over it with "
            "--force.",
            code="file_exists",
            param="to",
        )
