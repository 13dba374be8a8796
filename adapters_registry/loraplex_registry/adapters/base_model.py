"""Registers base models. A known fingerprint keeps its first name; other names it comes by are accepted ones.

The rank limit and the weights are the operator's choice: the last registration says what holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import msgspec
import sqlalchemy as sa

from loraplex_registry.adapters.view import BaseView, show_base
from loraplex_registry.db.column import MAX_BIG_INTEGER, MAX_INTEGER
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, BaseRow
from loraplex_registry.errors import InvalidRequestError, NameReservedError
from loraplex_registry.events import record_event
from loraplex_registry.peft.spec import MAX_LORA_RANK, BaseSpec
from loraplex_registry.peft.tensor_rule import SERVED_DTYPES
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.naming import check_name

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MODULE_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_PATH_LEN = 200
_MAX_NAMES = 64
_MAX_NAME_LEN = 200


class BaseModels:
    """The only writer of base rows."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_tenant: Callable[[str], bool] = lambda _: False
        """Whether a name is a tenant's; the gateway, which owns tenants, says so."""

    async def register(self, spec: BaseSpec, by: Identity) -> tuple[BaseView, bool]:
        """Register a base, or learn further names, the weights and the rank limit of one that is known.

        Returns:
            The base as it is now, and whether it is new.

        Raises:
            InvalidRequestError: A field makes no sense.
            NameReservedError: The name belongs to another base or to a tenant.
        """
        _check_spec(spec)

        async def work(change: Change) -> tuple[BaseView, bool]:
            known = await _find_by_fingerprint(change, spec.fingerprint)
            if known is None:
                await _check_free(change, spec.name, self.is_tenant)
                return show_base(await _insert(change, spec, by)), True
            _merge(change, known, spec, by)
            return show_base(known), False

        return await self._database.change(work)


def _check_spec(spec: BaseSpec) -> None:
    check_name(spec.name, "name")
    if not spec.fingerprint or len(spec.fingerprint) > 128:
        raise InvalidRequestError("fingerprint is 1 to 128 characters", param="fingerprint")
    if len(spec.weights_digest) > 128:
        raise InvalidRequestError("weights_digest is at most 128 characters", param="weights_digest")
    if len(spec.accepted_names) > _MAX_NAMES or any(not 0 < len(name) <= _MAX_NAME_LEN for name in spec.accepted_names):
        raise InvalidRequestError("accepted_names is up to 64 names of 1 to 200 characters", param="accepted_names")
    if not 1 <= spec.max_lora_rank <= MAX_LORA_RANK:
        raise InvalidRequestError(f"max_lora_rank is 1 to {MAX_LORA_RANK}", param="max_lora_rank")
    for field in ("vocab_size", "default_context"):
        if not 1 <= getattr(spec, field) <= MAX_INTEGER:
            raise InvalidRequestError(f"{field} is a positive integer", param=field)
    if not 0 <= spec.max_saved_bytes <= MAX_BIG_INTEGER:
        raise InvalidRequestError("max_saved_bytes is a number of bytes, 0 or more", param="max_saved_bytes")
    if not spec.matrix_hashes.keys() <= spec.modules.keys() or any(
        dtype not in SERVED_DTYPES or _SHA256.fullmatch(sha256) is None
        for hashes in spec.matrix_hashes.values()
        for dtype, sha256 in hashes.items()
    ):
        raise InvalidRequestError("matrix_hashes maps modules to dtype to sha256 in hex", param="matrix_hashes")
    _check_paths(spec.modules)


def _check_paths(paths: Collection[str]) -> None:
    if not paths:
        raise InvalidRequestError("modules maps at least one module to its features", param="modules")
    for path in paths:
        if len(path) > _MAX_PATH_LEN or _MODULE_PATH.fullmatch(path) is None:
            raise InvalidRequestError(
                f"A module's path is names of letters, digits, _ and - with dots between, not {ascii(path)[:80]}",
                param="modules",
            )


async def _find_by_fingerprint(change: Change, fingerprint: str) -> BaseRow | None:
    found = await change.session.execute(sa.select(BaseRow).where(BaseRow.fingerprint == fingerprint))
    return found.scalar_one_or_none()


async def _insert(change: Change, spec: BaseSpec, by: Identity) -> BaseRow:
    base = BaseRow(
        name=spec.name,
        accepted_names=sorted(set(spec.accepted_names) - {spec.name}),
        fingerprint=spec.fingerprint,
        weights_digest=spec.weights_digest,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        modules=msgspec.to_builtins(spec.modules),
        max_lora_rank=spec.max_lora_rank,
        default_context=spec.default_context,
        max_saved_bytes=spec.max_saved_bytes,
        matrix_hashes=spec.matrix_hashes,
        changed_epoch=change.epoch,
    )
    change.session.add(base)
    await change.session.flush()
    record_event(change.session, by, "base.registered", spec.name, after={"fingerprint": spec.fingerprint})
    return base


async def _check_free(change: Change, name: str, is_tenant: Callable[[str], bool]) -> None:
    """A base is called by its bare name, as a tenant is."""
    base = await change.session.execute(sa.select(BaseRow.id).where(BaseRow.name == name))
    if base.first() is not None:
        raise NameReservedError(f"another base is called {name}; give --served-model-name", param="name")
    tenant = await change.session.execute(
        sa.select(AdapterRow.id).where(AdapterRow.tenant == name, AdapterRow.deleted_at.is_(None)).limit(1)
    )
    if tenant.first() is not None or is_tenant(name):
        raise NameReservedError(f"A tenant is called {name}; give --served-model-name", param="name")


def _change_weights(change: Change, known: BaseRow, spec: BaseSpec, by: Identity) -> None:
    """Take over other weights of the same model; the parity gate compares adapters on them in its own time."""
    before, after = ({"weights_digest": digest} for digest in (known.weights_digest, spec.weights_digest))
    known.weights_digest, known.matrix_hashes = spec.weights_digest, spec.matrix_hashes
    known.changed_epoch = change.epoch
    record_event(change.session, by, "base.weights_changed", known.name, before=before, after=after)


def _merge(change: Change, known: BaseRow, spec: BaseSpec, by: Identity) -> None:
    if spec.weights_digest not in ("", known.weights_digest):
        _change_weights(change, known, spec, by)
    elif spec.weights_digest == known.weights_digest and spec.matrix_hashes and not known.matrix_hashes:
        # a base that was registered before its matrices were hashed
        known.matrix_hashes = spec.matrix_hashes
        known.changed_epoch = change.epoch
    if spec.max_lora_rank != known.max_lora_rank:
        before, after = ({"max_lora_rank": limit} for limit in (known.max_lora_rank, spec.max_lora_rank))
        known.max_lora_rank = spec.max_lora_rank
        known.changed_epoch = change.epoch
        record_event(change.session, by, "base.rank_limit_changed", known.name, before=before, after=after)
    names = sorted({*known.accepted_names, *spec.accepted_names, spec.name} - {known.name})
    if names == known.accepted_names:
        return
    former, known.accepted_names = known.accepted_names, names
    known.changed_epoch = change.epoch
    record_event(
        change.session,
        by,
        "base.names_added",
        known.name,
        before={"accepted_names": former},
        after={"accepted_names": names},
    )
