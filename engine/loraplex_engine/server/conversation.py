"""From the messages of a request to the ids of its prompt, and to what its answers may call.

`ConversationReader` knows templates and how each writes calls; rendering and tokenising are other modules'.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex_engine.server.chat_input import ChatInput
from loraplex_engine.server.constraint.field import read_constraint
from loraplex_engine.server.constraint.task import GrammarTask
from loraplex_engine.server.prompt import PromptReader
from loraplex_engine.server.template import Template
from loraplex_engine.server.template_library import TemplateLibrary
from loraplex_engine.server.tool.format import ToolFormat, choose_format
from loraplex_engine.server.tool.plan import ToolPlan, build_plan, offered_tools
from loraplex_engine.server.tool.prompt import prepare
from loraplex_engine.token_table import TokenTable
from loraplex_engine.wire.openai import ChatRequest, TokenizeRequest, Tool


class Conversation(msgspec.Struct, frozen=True):
    """A chat as the core takes it."""

    ids: list[int]
    plan: ToolPlan | None
    """How its answers call; None: they do not."""
    task: GrammarTask | None
    """What they must match."""


class ConversationReader:
    """Reads chats for one base and the adapters that bring templates."""

    def __init__(
        self, templates: TemplateLibrary, prompts: PromptReader, table: TokenTable, tool_call_parser: str
    ) -> None:
        self._templates = templates
        self._prompts = prompts
        self._special_ids = table.special_ids
        self._parser = tool_call_parser

    async def read(
        self, request: ChatRequest, digest: str | None, max_model_len: int, *, tenant_id: str
    ) -> Conversation:
        """Return what a chat asks for.

        Raises:
            InvalidRequestError: Something in it contradicts the rest or the template; `param` names the field.
            LoadFailedError, NotReadyError: The adapter's template cannot be had now.
        """
        constraint, tools = read_constraint(request), offered_tools(request)
        template, form = await self._find(tools, digest, tenant_id)
        plan = build_plan(request, form, self._special_ids, constraint)
        chat = msgspec.structs.replace(ChatInput.of(request), tools=tools)
        ids = await self._prompts.read_chat(template, prepare(chat, form), max_model_len, tenant_id=tenant_id)
        return Conversation(ids, plan, constraint if plan is None else plan.grammar)

    async def read_ids(
        self, request: TokenizeRequest, digest: str | None, max_model_len: int, *, tenant_id: str
    ) -> list[int]:
        """Return the prompt alone. Raises as above."""
        template, form = await self._find(request.tools, digest, tenant_id)
        chat = prepare(ChatInput.of(request), form)
        return await self._prompts.read_chat(template, chat, max_model_len, tenant_id=tenant_id)

    async def _find(self, tools: Sequence[Tool], digest: str | None, tenant_id: str) -> tuple[Template, ToolFormat]:
        template = await self._templates.get(digest, has_tools=bool(tools), tenant_id=tenant_id)
        return template, choose_format(template.source, self._parser, knows_tools=template.facts.reads_tools)
