"""The keys of the parts: there, strong, readable by their owner alone, and the same wherever they must be.

Whether other machines have the same shows where these are asked: engines by `engines`, the registry here, the pepper by
the hashes in the database.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import sqlalchemy as sa

from loraplex.db.database import check_database_url
from loraplex.doctor.finding import Finding
from loraplex.doctor.patient import Patient
from loraplex.keys.secret import is_same_secret, parse_key
from loraplex_registry.wire.identity import TokenError, TokenSigner, TokenVerifier, split_public_keys

_MIN_LEN, _MIN_DISTINCT = 16, 8
_PLACEHOLDER = re.compile(
    "a|admin|an|change|changeme|default|demo|dummy|engine|example|foo|insecure|key|lora|loraplex|me|my|none|pass|"
    "password|pepper|please|sample|secret|test|testing|the|this|to|todo|token|value|x+|your"
)
_NAMES = {
    "LORAPLEX_ADMIN_KEY": "keys.admin",
    "LORAPLEX_KEY_PEPPER": "keys.pepper",
    "LORAPLEX_ENGINE_KEY": "keys.engine",
}
_MADE_BY_ITSELF = ("LORAPLEX_ADMIN_KEY", "LORAPLEX_KEY_PEPPER", "LORAPLEX_SIGNING_KEY")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_NO_DIGEST = f"sha256:{'0' * 64}"
_ASK_S = 5.0
_PEPPER = "LORAPLEX_KEY_PEPPER"
_RANDOM = "openssl rand -hex 32"


def check_keys(patient: Patient) -> Iterator[Finding]:
    """Look at every key that the part reads."""
    for name, check in _NAMES.items():
        if name in patient.resolved.settings:
            yield _judge_secret(patient, name, check)
    yield from _check_signing(patient)
    yield from _check_files(patient)


def is_weak(secret: str) -> bool:
    """Say whether a secret is short, monotonous, or made of words that stand in examples."""
    words = re.findall(r"[a-z]+", secret.lower())
    is_placeholder = bool(words) and all(_PLACEHOLDER.fullmatch(word) for word in words)
    return len(secret) < _MIN_LEN or len(set(secret)) < _MIN_DISTINCT or is_placeholder


def _judge_secret(patient: Patient, name: str, check: str) -> Finding:
    value = patient.value(name)
    if value is None:
        return _judge_absent(patient, name, check)
    if path := find_empty_file(patient, name):
        return _tell_empty(check, path, name)
    if is_weak(value):
        why = f"{name} is short or one that stands in examples: it can be guessed."
        price = f", which ends every API key that there is by now: {_RANDOM}" if name == _PEPPER else f": {_RANDOM}"
        return Finding(check, "fail", why, f"Make another{price}")
    return Finding(check, "ok", f"{name} is there.")


def find_empty_file(patient: Patient, name: str) -> str | None:
    """Return the file that a key is read from and that is empty, as a copy onto a full disk leaves it."""
    found = patient.resolved.settings.get(name)
    return found.path if found is not None and found.value == "" else None


def _tell_empty(check: str, path: str, name: str) -> Finding:
    remedy = "Restore it from the backup."
    if name == _PEPPER:
        remedy = "Restore it from the backup: another pepper would end every API key."
    return Finding(check, "fail", f"{path} is empty.", remedy)


def _judge_absent(patient: Patient, name: str, check: str) -> Finding:
    if name in _MADE_BY_ITSELF and patient.folder is not None:
        return Finding(check, "skip", f"{name} is not there yet; the first start makes it in {patient.folder.path}.")
    if name == "LORAPLEX_ENGINE_KEY" and patient.part == "up":
        return Finding(check, "skip", "engine.key is not there yet; the first start makes it.")
    if name == "LORAPLEX_ENGINE_KEY":
        remedy = f"Give the same LORAPLEX_ENGINE_KEY to gateway and engines: {_RANDOM}"
        return Finding(check, "warn", "There is no engine key: engines cannot read adapters.", remedy)
    return Finding(check, "fail", f"There is no {name}, and no data folder to make one in.", f"Set {name}: {_RANDOM}")


def _check_signing(patient: Patient) -> Iterator[Finding]:
    check = "keys.signing"
    private = patient.value("LORAPLEX_SIGNING_KEY")
    if private is None:
        if "LORAPLEX_SIGNING_KEY" in patient.resolved.settings:
            yield _judge_absent(patient, "LORAPLEX_SIGNING_KEY", check)
        elif patient.value("LORAPLEX_VERIFY_KEYS") is not None:
            kids = _read_kids(patient.value("LORAPLEX_VERIFY_KEYS") or "")
            yield Finding(check, "ok", f"Identities are trusted that are signed by {', '.join(kids)}.")
        return
    if path := find_empty_file(patient, "LORAPLEX_SIGNING_KEY"):
        yield _tell_empty(check, path, "LORAPLEX_SIGNING_KEY")
        return
    signer = TokenSigner(private.encode())
    yield Finding(check, "ok", f"The signing key is {signer.kid}.")
    public = _find_public(patient)
    if public is None:
        return
    place, text = public
    kids = _read_kids(text)
    if signer.kid not in kids:
        why = f"{place} trusts {', '.join(kids) or 'no key'}, and not the signing key {signer.kid}: engines refuse all."
        remedy = "Give engines the public half: openssl pkey -in signing.pem -pubout"
        yield Finding("keys.same", "fail", why, remedy)
    else:
        yield Finding("keys.same", "ok", f"{place} trusts the signing key.")


def _find_public(patient: Patient) -> tuple[str, str] | None:
    """Return what engines of this machine trust, where it can be seen."""
    given = patient.environ.get("LORAPLEX_VERIFY_KEYS")
    file = patient.environ.get("LORAPLEX_VERIFY_KEYS_FILE")
    if given:
        return "LORAPLEX_VERIFY_KEYS", given
    path = Path(file) if file else patient.folder.verify_keys if patient.folder and patient.part == "up" else None
    if path is None or not path.exists():
        return None
    return str(path), path.read_text(encoding="utf-8")


def _read_kids(text: str) -> tuple[str, ...]:
    try:
        return TokenVerifier(split_public_keys(text), "engine").kids
    except (TokenError, ValueError):
        return ()


def _check_files(patient: Patient) -> Iterator[Finding]:
    """Files with secrets that others of this machine can read."""
    paths = {
        found.path for found in patient.resolved.settings.values() if found.setting.is_secret and found.path is not None
    }
    open_ones = [path for path in sorted(paths) if _is_open(Path(path))]
    for path in open_ones:
        yield Finding("keys.files", "warn", f"{path} can be read by other users.", f"chmod 600 {path}")
    if paths and not open_ones:
        yield Finding("keys.files", "ok", "Files with keys can be read by their owner alone.")


def _is_open(path: Path) -> bool:
    # Kubernetes mounts a secret as a link to a file that a group may read
    try:
        return not path.is_symlink() and bool(path.stat().st_mode & _OTHERS)
    except OSError:
        return False


def check_pepper(patient: Patient) -> Iterator[Finding]:
    """Compare pepper and admin key with what gateways have written into the database."""
    url, pepper, admin = (patient.value(f"LORAPLEX_{name}") for name in ("DATABASE_URL", "KEY_PEPPER", "ADMIN_KEY"))
    if not (url and pepper and admin) or _is_absent(url):
        yield Finding("keys.hashes", "skip", "It takes database, pepper and admin key to compare them.")
        return
    key = parse_key(admin, pepper.encode())
    rows = _read_bootstrap(url.replace("sqlite+aiosqlite", "sqlite"), patient.limit_s)
    if not rows:
        yield Finding("keys.hashes", "skip", "No gateway has written an admin key yet.")
        return
    known: Mapping[str, bytes] = dict(rows)
    if key.lookup in known and is_same_secret(key.secret, pepper.encode(), known[key.lookup]):
        yield Finding("keys.hashes", "ok", "Pepper and admin key are those of the gateways of this database.")
        return
    yield Finding(
        "keys.hashes",
        "fail",
        "The gateways of this database have another pepper or admin key: API keys would be refused here.",
        "Give every gateway the same LORAPLEX_KEY_PEPPER and LORAPLEX_ADMIN_KEY.",
    )


def _is_absent(url: str) -> bool:
    parsed = check_database_url(url)
    return parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists()


def _read_bootstrap(url: str, limit_s: float) -> list[tuple[str, bytes]]:
    is_sqlite = url.startswith("sqlite")
    bound = {"timeout": 2.0} if is_sqlite else {"connect_timeout": max(2, int(limit_s / 2))}
    engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args=bound)
    query = sa.text("SELECT lookup, secret_hmac FROM api_key WHERE is_bootstrap AND revoked_at IS NULL")
    try:
        with engine.connect() as connection:
            return [(lookup, bytes(hashed)) for lookup, hashed in connection.execute(query)]
    except sa.exc.DatabaseError:
        # unreachable or never migrated: the check of the database says so
        return []
    finally:
        engine.dispose()


def check_registry_door(patient: Patient) -> Iterator[Finding]:
    """Read an artifact that there is not, as an engine does: 404 says that the registry knows the engine key."""
    url, key = patient.value("LORAPLEX_REGISTRY_URL"), patient.value("LORAPLEX_ENGINE_KEY")
    if patient.part != "engine" or not url:
        yield Finding("registry.reachable", "skip", "It is for engines, with LORAPLEX_REGISTRY_URL.")
        return
    path = f"/internal/artifacts/{_NO_DIGEST}/manifest"
    with httpx.Client(base_url=url, timeout=_ASK_S, trust_env=False) as http:
        try:
            status = http.get(path, headers={"authorization": f"Bearer {key or ''}"}).status_code
        except httpx.TransportError as error:
            remedy = "Check LORAPLEX_REGISTRY_URL, the network and network policies, and that the gateway runs."
            yield Finding("registry.reachable", "fail", f"Nothing answers at {url}: {type(error).__name__}.", remedy)
            return
    yield Finding("registry.reachable", "ok", f"{url} answers.")
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        why = f"{url} refuses this engine's key: it has another one, and no adapter can be loaded."
        yield Finding("keys.same", "fail", why, "Give gateway and engines the same LORAPLEX_ENGINE_KEY.")
    elif status == httpx.codes.NOT_FOUND:
        yield Finding("keys.same", "ok", "The registry knows this engine's key.")
    else:
        yield Finding("keys.same", "warn", f"{url} answered {status}.", "Look at the gateway's log.")
