"""Secrets that one machine makes for itself on first start: files of mode 0600 in the data folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from loraplex.errors import SettingsError
from loraplex.keys.secret import new_key_text
from loraplex_registry.wire.identity import TokenError, TokenSigner, generate_signing_key

ADMIN_KEY_FILE = "admin.key"
PEPPER_FILE = "key.pepper"
SIGNING_KEY_FILE = "signing.pem"
_MIN_GIVEN_KEY_LEN = 16


def load_admin_key(given: str | None, data_dir: Path | None) -> tuple[str, bool]:
    """Return the bootstrap admin key and whether it was made just now.

    Args:
        given: The operator's own (LORAPLEX_ADMIN_KEY); then no file is read or written.
        data_dir: Where `admin.key` lies or will lie.

    Raises:
        SettingsError: The given key is too short, or there is no place to keep a new one.
    """
    if given is not None:
        return check_admin_key(given), False
    made, is_new = _read_or_create(ADMIN_KEY_FILE, data_dir, "LORAPLEX_ADMIN_KEY", lambda: new_key_text() + "\n")
    return made.strip(), is_new


def load_pepper(given: str | None, data_dir: Path | None) -> bytes:
    """Return the secret with which API keys are hashed; losing it makes every key invalid."""
    if given is not None:
        return given.encode()
    made, _ = _read_or_create(PEPPER_FILE, data_dir, "LORAPLEX_KEY_PEPPER", lambda: secrets.token_hex(32) + "\n")
    return made.strip().encode()


def load_signing_key(given: str | None, data_dir: Path | None) -> bytes:
    """Return the private key (PEM) with which identities are signed."""
    if given is not None:
        return given.encode()
    made, _ = _read_or_create(
        SIGNING_KEY_FILE, data_dir, "LORAPLEX_SIGNING_KEY", lambda: generate_signing_key().decode()
    )
    return made.encode()


def load_signer(given: str | None, data_dir: Path | None) -> TokenSigner:
    """Return the signer of identities.

    Raises:
        SettingsError: The key is no Ed25519 private key in PEM.
    """
    try:
        return TokenSigner(load_signing_key(given, data_dir))
    except (ValueError, TypeError, TokenError) as error:
        raise SettingsError("LORAPLEX_SIGNING_KEY is not an Ed25519 private key in PEM") from error


def check_admin_key(key: str) -> str:
    """Return an operator's own admin key.

    Raises:
        SettingsError: It is too short, or has characters that headers cannot carry.
    """
    if len(key) < _MIN_GIVEN_KEY_LEN or not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError(
            f"LORAPLEX_ADMIN_KEY must have at least {_MIN_GIVEN_KEY_LEN} printable ASCII characters and no blanks"
        )
    return key


def _read_or_create(name: str, data_dir: Path | None, setting: str, make: Callable[[], str]) -> tuple[str, bool]:
    if data_dir is None:
        raise SettingsError(f"Set {setting}, or LORAPLEX_DATA_DIR so that one can be made and kept")
    path = data_dir / name
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        return _create(path, make()), True
    except FileExistsError:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            # a new one would not open what the old one closed
            raise SettingsError(f"{path} is empty; put it back from a backup, or set {setting}") from None
        return text, False
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


def _create(path: Path, text: str) -> str:
    """Write a whole new file: complete under another name first, so that a crash leaves none half made."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    finally:
        draft.unlink()
    return text
