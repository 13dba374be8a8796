"""Routes of base models: platform keys read them, admins that may write register them."""

from __future__ import annotations

import msgspec
from litestar import Controller, Response, get, post

from loraplex_registry.adapters.lookup import list_bases
from loraplex_registry.adapters.page import Page, build_page
from loraplex_registry.adapters.view import BaseView, show_base
from loraplex_registry.api.caller import check_admin
from loraplex_registry.api.reading import read_json, read_page_order, read_query
from loraplex_registry.api.service import Call, Work
from loraplex_registry.db.column import MAX_INTEGER
from loraplex_registry.errors import InvalidRequestError
from loraplex_registry.peft.spec import MAX_SAVED_BYTES, BaseSpec, ModuleKind, ModuleSpec


class NewModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module of a base to register; the fields of a `ModuleSpec`."""

    out_features: int
    in_features: int
    kind: ModuleKind = "linear"
    has_bias: bool = False
    tied: bool = False


class NewBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A base to register; a module is its spec, or just [out, in]."""

    name: str
    fingerprint: str
    modules: dict[str, tuple[int, int] | NewModule]
    vocab_size: int
    accepted_names: tuple[str, ...] = ()
    weights_digest: str = ""
    max_lora_rank: int = 64
    default_context: int = 2048
    architecture: str = "LlamaForCausalLM"
    max_saved_bytes: int = MAX_SAVED_BYTES
    matrix_hashes: dict[str, dict[str, str]] = {}

    def build_spec(self) -> BaseSpec:
        """Return what adapters of the base are judged against."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__} | {"modules": self._build_modules()}
        return BaseSpec(**fields)

    def _build_modules(self) -> dict[str, ModuleSpec]:
        modules = {
            path: ModuleSpec(*(module if isinstance(module, tuple) else msgspec.structs.astuple(module)))
            for path, module in self.modules.items()
        }
        for path, module in modules.items():
            if not all(1 <= features <= MAX_INTEGER for features in (module.out_features, module.in_features)):
                raise InvalidRequestError(f"{path} has features that are not 1 to {MAX_INTEGER}", param="modules")
        return modules


class BaseRoutes(Controller):
    """`/api/v1/bases`."""

    path = "/api/v1/bases"

    @get()
    async def list_all(self, request: Call, services: Work) -> Page[BaseView]:
        """List bases, newest first."""
        check_admin(request, writes=False)
        order = read_page_order(request)
        async with services.database.read() as session:
            bases = [show_base(base) for base in reversed(await list_bases(session))]
        after = order.after(str)
        if after is not None:
            names = [base.name for base in bases]
            bases = bases[names.index(after) + 1 :] if after in names else []
        return build_page(bases[: order.limit + 1], order.limit, lambda base: base.name)

    @post()
    async def register(self, request: Call, services: Work) -> Response[BaseView]:
        """Register a base; the same again changes nothing."""
        caller = check_admin(request, writes=True)
        read_query(request)
        new = await read_json(request, NewBase)
        base, is_new = await services.bases.register(new.build_spec(), caller)
        return Response(base, status_code=201 if is_new else 200)
