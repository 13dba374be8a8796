"""The chat templates of one engine: the base's, and those that adapters bring, by digest.

`TemplateLibrary` is the only writer of its cache. A digest says which bytes a template has, so what was found once
holds for ever; what could not be fetched is not remembered. An adapter's template never runs in this process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import jinja2
import msgspec

from loraplex_engine.errors import BaseUnsupportedError, InvalidRequestError
from loraplex_engine.server.chat_template import ChatTemplate, compile_template
from loraplex_engine.server.sandbox.client import Sandbox
from loraplex_engine.server.template import Template
from loraplex_engine.server.tokenizer import Tokenizer, read_json_object

_MAX_TEMPLATES = 256
_DEFAULT, _FOR_TOOLS = "default", "tool_use"


class TemplateFiles(Protocol):
    """Where the templates of adapters lie."""

    async def find(self, digest: str) -> str | None:
        """Return the template that an adapter brings. Raises LoadFailedError if that cannot be known now."""

    def close(self) -> None:
        """Let go of connections."""


class TemplateLibrary:
    """Templates by digest; None is the base."""

    def __init__(self, tokenizer: Tokenizer, sandbox: Sandbox, files: TemplateFiles | None = None) -> None:
        """Read the templates in the tokenizer's folder.

        Args:
            tokenizer: the base's.
            sandbox: where adapters' templates are compiled and rendered.
            files: where they come from; None: adapters bring none.

        Raises:
            BaseUnsupportedError: The base's template is none.
        """
        self._tokenizer = tokenizer
        self._sandbox = sandbox
        self._files = files
        self._base = {name: self._build_base(source) for name, source in read_sources(tokenizer.folder).items()}
        self._found: OrderedDict[str, Template | None] = OrderedDict()
        self._searches: dict[str, asyncio.Task[Template | None]] = {}

    def close(self) -> None:
        """Stop what is being fetched."""
        for search in self._searches.values():
            search.cancel()
        if self._files is not None:
            self._files.close()

    async def get(self, digest: str | None, *, has_tools: bool = False, tenant_id: str = "") -> Template:
        """Return the template for chats with an adapter, or with the base.

        Args:
            digest: The adapter's; None: the base.
            has_tools: Some bases have another template for chats with tools.
            tenant_id: Whose turn in the sandbox it is.

        Raises:
            InvalidRequestError: Neither the adapter nor the base has a template, or the adapter's is none.
            LoadFailedError: The adapter's files cannot be reached.
            NotReadyError: The sandbox had no place in time.
        """
        own = await self._find_own(digest, tenant_id) if digest is not None and self._files is not None else None
        if own is not None:
            return own
        base = self._base.get(_FOR_TOOLS) if has_tools else None
        base = base or self._base.get(_DEFAULT)
        if base is None:
            raise InvalidRequestError(
                "This base has no chat template; use /v1/completions with a whole prompt.", param="messages"
            )
        return base

    async def _find_own(self, digest: str, tenant_id: str) -> Template | None:
        if digest in self._found:
            self._found.move_to_end(digest)
            return self._found[digest]
        search = self._searches.get(digest)
        if search is None:
            search = asyncio.create_task(self._search(digest, tenant_id))
            self._searches[digest] = search
            search.add_done_callback(lambda done: self._forget(digest, done))
        # one caller that goes away must not end it for the others
        return await asyncio.shield(search)

    def _forget(self, digest: str, search: asyncio.Task[Template | None]) -> None:
        del self._searches[digest]
        if not search.cancelled():
            # its callers may all have gone away
            search.exception()

    async def _search(self, digest: str, tenant_id: str) -> Template | None:
        assert self._files is not None
        source = await self._files.find(digest)
        template = None if source is None else await self._build_own(source, tenant_id)
        self._found[digest] = template
        if len(self._found) > _MAX_TEMPLATES:
            self._found.popitem(last=False)
        return template

    async def _build_own(self, source: str, tenant_id: str) -> Template | None:
        """Return an adapter's template; None if it is the base's, which needs no sandbox."""
        default = self._base.get(_DEFAULT)
        if default is not None and source == default.source:
            return None
        inspected = await self._sandbox.inspect(source, tenant_id=tenant_id)
        return Template(source, inspected.facts, inspected.code, self._tokenizer, self._sandbox)

    def _build_base(self, source: str) -> Template:
        try:
            compiled = compile_template(source)
        except jinja2.TemplateError as error:
            raise BaseUnsupportedError(f"The base's chat template cannot be read: {error}") from error
        here = ChatTemplate(compiled.code, self._tokenizer.special_tokens)
        return Template(source, compiled.facts, compiled.dump(), self._tokenizer, self._sandbox, here)


def read_sources(folder: Path) -> dict[str, str]:
    """Return the base's templates by name, as transformers finds them: files go before `tokenizer_config.json`.

    Raises:
        BaseUnsupportedError: One of them cannot be read.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        more = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        return {name: _read_text(path) for name, path in (more | {_DEFAULT: file}).items()}
    source = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if source is None:
        return {}
    if isinstance(source, str):
        return {_DEFAULT: source}
    try:
        named = msgspec.convert(source, list[_NamedTemplate])
    except msgspec.ValidationError:
        named = []
    sources = {item.name: item.template for item in named}
    if _DEFAULT not in sources:
        raise BaseUnsupportedError("The base's chat template is neither text nor a list with a `default`.")
    return sources


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BaseUnsupportedError(f"{path} is not UTF-8.") from None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str
