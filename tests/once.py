"""What every gateway and every client of a test makes anew though it never differs is made once in a process.

Reading the signatures of all routes and the machine's certificates is a third of the time that a gateway needs, and
compiling the same statements for each database a tenth of what a test of the registry needs.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import httpx._transports.default as httpx_transport
import litestar.controller
import litestar.router
from litestar._kwargs import KwargsModel
from litestar._signature.model import SignatureModel
from litestar.utils.signature import ParsedSignature
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg, PGDialectAsync_psycopg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.engine import URL, Engine
from sqlalchemy.util import LRUCache

from loraplex.dashboard import asset

_parse = ParsedSignature.from_fn
_parsed: dict[tuple[object, ...], ParsedSignature] = {}
_model = SignatureModel.create
_models: dict[tuple[object, ...], tuple[ParsedSignature, type[SignatureModel]]] = {}
_arguments = KwargsModel.create_for_signature_model
_argued: dict[tuple[object, ...], KwargsModel] = {}


def remember() -> None:
    """Change Litestar, SQLAlchemy and httpx in this process."""
    ParsedSignature.from_fn = _parse_once  # type: ignore[method-assign, assignment]
    ParsedSignature.__deepcopy__ = _keep  # type: ignore[method-assign, assignment]
    SignatureModel.create = _model_once  # type: ignore[method-assign]
    KwargsModel.create_for_signature_model = _arguments_once  # type: ignore[method-assign]
    # routers are made for one application, which may have them as they are
    litestar.router.deepcopy = _keep  # type: ignore[attr-defined, assignment]
    litestar.controller.deepcopy = copy.copy  # type: ignore[attr-defined, assignment]
    asset._read = functools.cache(asset._read)
    registry.register("sqlite.aiosqlite", __name__, "_OneSqlite")
    registry.register("postgresql.psycopg", __name__, "_EitherPostgres")
    httpx_transport.create_ssl_context = functools.cache(httpx_transport.create_ssl_context)


def _parse_once(function: Any, names: dict[str, Any]) -> ParsedSignature:
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return _parse(function, names)
    # closures of the same code: routes are functions within functions
    key = (code, function.__defaults__, tuple(sorted(names)))
    if key not in _parsed:
        _parsed[key] = _parse(function, names)
    return _parsed[key]


def _model_once(
    dependency_name_set: set[str],
    fn: Any,
    parsed_signature: ParsedSignature,
    type_decoders: Any,
    data_dto: Any = None,
) -> type[SignatureModel]:
    predicates = tuple(predicate for predicate, _ in type_decoders or ())
    key = (id(parsed_signature), frozenset(dependency_name_set), predicates, data_dto)
    if key not in _models:
        # beside its signature, whose id nothing else may get
        _models[key] = parsed_signature, _model(dependency_name_set, fn, parsed_signature, type_decoders, data_dto)
    return _models[key][1]


def _arguments_once(
    signature_model: type[SignatureModel],
    parsed_signature: ParsedSignature,
    dependencies: dict[str, Any],
    path_parameters: set[str],
    layered_parameters: dict[str, Any],
    ctx: Any = None,
) -> KwargsModel:
    given = signature_model, parsed_signature, dependencies, path_parameters, layered_parameters, ctx
    if dependencies or layered_parameters:
        # these are the application's own
        return _arguments(*given)
    key = (signature_model, frozenset(path_parameters))
    if key not in _argued:
        _argued[key] = _arguments(*given)
    return _argued[key]


def _keep(value: Any, _: object = None) -> Any:
    return value


class _One:
    """A dialect of which there is one for all engines made alike, and with it what was compiled for it."""

    _made: dict[tuple[object, ...], Any] = {}
    _compiled: LRUCache[Any, Any] = LRUCache(2000)

    def __new__(cls, **options: Any) -> Any:
        key = (cls, *sorted((name, value) for name, value in options.items() if name != "dbapi"))
        if key not in cls._made:
            cls._made[key] = super().__new__(cls)
        return cls._made[key]

    def __init__(self, **options: Any) -> None:
        if "dbapi" not in vars(self):
            super().__init__(**options)

    @classmethod
    def engine_created(cls, engine: Engine) -> None:
        engine._compiled_cache = cls._compiled


class _OneSqlite(_One, SQLiteDialect_aiosqlite):
    supports_statement_cache = True


class _OnePostgres(_One, PGDialectAsync_psycopg):
    supports_statement_cache = True


class _EitherPostgres(PGDialect_psycopg):
    """Postgres by URL: what does not wait for it asynchronously is as ever."""

    supports_statement_cache = True

    @classmethod
    def get_async_dialect_cls(cls, url: URL) -> type[PGDialectAsync_psycopg]:
        return _OnePostgres
