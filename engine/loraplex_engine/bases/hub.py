"""Fetches a model from the Hugging Face hub: one bounded question, then resumable downloads checked by digest."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex_engine.bases.progress import PullProgress
from loraplex_engine.errors import BaseUnavailableError, BaseUnsupportedError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

_ATTEMPT_S = 5.0
_PIECE_BYTES = 1 << 20
_WANTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|chat_template\.jinja|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)


def fetch_hub(repo_id: str, staging: Path, progress: PullProgress) -> str:
    """Download what serving needs of `repo_id` into `staging`.

    Parts are kept beside `staging` until all are there, so the next pull goes on where this one stopped.

    Returns:
        The commit that was downloaded.

    Raises:
        BaseUnavailableError: the hub does not answer within 5 s, does not know the model, or cuts the download.
        BaseUnsupportedError: the model has no safetensors.
    """
    info = _ask(repo_id)
    wanted = [file for file in info.siblings or [] if _WANTED.fullmatch(file.rfilename)]
    if not any(file.rfilename.endswith(".safetensors") for file in wanted):
        raise BaseUnsupportedError(f"{repo_id} has no model.safetensors on the hub.")
    progress.begin(f"Downloading {repo_id}", sum(file.size or 0 for file in wanted))
    parts = staging.with_suffix(".hub")
    parts.mkdir(exist_ok=True)
    for file in wanted:
        _download(repo_id, str(info.sha), file, parts, progress)
    for file in wanted:
        (parts / file.rfilename).rename(staging / file.rfilename)
    shutil.rmtree(parts)
    return str(info.sha)


def find_cached(repo_id: str) -> Path | None:
    """The snapshot of `repo_id` in the hub's own cache, if it is there with weights; asks nobody."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
    except Exception:  # noqa: BLE001 -- any failure means that there is none
        return None
    return folder if any(folder.glob("*.safetensors")) and (folder / "config.json").exists() else None


def _ask(repo_id: str) -> ModelInfo:
    """One question, 5 s in all: a thread, because looking up the hub's address has no time limit of its own."""
    answer: list[ModelInfo | Exception] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            answer.append(HfApi().model_info(repo_id, files_metadata=True, timeout=_ATTEMPT_S))
        except Exception as error:  # noqa: BLE001 -- handed to the caller below
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ATTEMPT_S)
    result = answer[0] if answer else TimeoutError(f"no answer in {_ATTEMPT_S:.0f} s")
    if isinstance(result, Exception):
        raise BaseUnavailableError(_explain(repo_id, result)) from result
    return result


def _explain(repo_id: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated on the hub: accept its terms there and set HF_TOKEN."
    if isinstance(error, RepositoryNotFoundError):
        return f"The hub has no model {repo_id}, or HF_TOKEN may not see it."
    if isinstance(error, OfflineModeIsEnabled):
        return f"{repo_id} cannot be fetched: HF_HUB_OFFLINE is set."
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"The Hugging Face hub cannot be reached for {repo_id} ({reason})."


def _download(repo_id: str, revision: str, file: RepoSibling, parts: Path, progress: PullProgress) -> None:
    """Fetch one file, going on from the bytes that are there; the digest decides whether it is whole and right."""
    path = parts / file.rfilename
    size = path.stat().st_size if path.exists() else 0
    if file.size is None or size < file.size:
        _fetch_rest(repo_id, revision, path, size, progress)
    else:
        progress.advance(size)
    _check_digest(path, file)


def _fetch_rest(repo_id: str, revision: str, path: Path, size: int, progress: PullProgress) -> None:
    # hf_hub_download begins every file anew in another process; http_get beneath it takes a position
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

    url = hf_hub_url(repo_id, path.name, revision=revision)
    try:
        with path.open("ab") as stream:
            http_get(url, stream, resume_size=size, headers=build_hf_headers(), tqdm_class=_relay(progress))
    except Exception as error:
        raise BaseUnavailableError(f"{_explain(repo_id, error)} Pull again to go on where it stopped.") from error


def _check_digest(path: Path, file: RepoSibling) -> None:
    """Large files have a sha256 on the hub, small ones git's own digest."""
    size = path.stat().st_size
    if file.lfs is not None:
        expected, digest = file.lfs.sha256, hashlib.sha256()
    else:
        expected, digest = file.blob_id or "", hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != expected:
        path.unlink()
        raise BaseUnavailableError(f"{path.name} arrived with the wrong digest; pull again.")


def _relay(progress: PullProgress) -> Any:
    """A `tqdm` that moves our bar instead of drawing its own."""
    from huggingface_hub.utils.tqdm import tqdm

    class Relay(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            progress.advance(int(kwargs.get("initial") or 0))
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            progress.advance(int(n or 0))
            return bool(super().update(n))

    return Relay
