"""One chat template as the front uses it: the base's renders small chats here, all else goes to the sandbox."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from loraplex_engine.server.chat_template import Chat, ChatTemplate
from loraplex_engine.server.control_token import Marks, count_chars, has_control
from loraplex_engine.server.sandbox.client import Sandbox
from loraplex_engine.server.sandbox.task import RenderTask
from loraplex_engine.server.thread import run_in_thread
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_registry.peft.template_facts import TemplateFacts

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
# what a template of the base does in a millisecond or two
_MAX_MESSAGES_HERE, _MAX_CHARS_HERE = 64, 1 << 16


class Template:
    """A template's text, what it reads, and how it is rendered."""

    def __init__(
        self,
        source: str,
        facts: TemplateFacts,
        code: bytes,
        tokenizer: Tokenizer,
        sandbox: Sandbox,
        here: ChatTemplate | None = None,
    ) -> None:
        """Take a template.

        Args:
            source: its text.
            facts: what it reads.
            code: for the sandbox.
            tokenizer: knows the model's control tokens.
            sandbox: where it is rendered.
            here: the same, if it may be rendered in this process.
        """
        self.source = source
        self.facts = facts
        self.special_tokens = tokenizer.special_tokens
        """Variables that it gets beside those of the chat."""
        self._special = tokenizer.special
        self._control = tokenizer.control_pattern(facts.literal_text)
        self._code = code
        self._sandbox = sandbox
        self._here = here

    async def render(self, chat: Chat, *, tenant_id: str = "") -> list[str | None]:
        """Return the prompt in pieces: what the template wrote, a control token that is plain text, and so on.

        A template may look for a token in a text and miss it behind a mark, say the end of a thought that it leaves
        out. Where marks change what is written, an assistant's text keeps the tokens that the template writes itself.

        Args:
            chat: what to render.
            tenant_id: whose turn in the sandbox it is.

        Raises:
            InvalidRequestError: The template refuses the chat, or takes too much.
            NotReadyError: The sandbox had no place in time.
        """
        is_small = len(chat.messages) <= _MAX_MESSAGES_HERE and count_chars(chat) <= _MAX_CHARS_HERE
        run = _run_here if is_small else _run_in_thread
        if not await run(has_control, chat, self._control):
            return [await self._write(chat, tenant_id, is_small=is_small)]
        marks = await run(Marks, chat, self.source, self._control)
        plain = await self._write(chat, tenant_id, is_small=is_small)
        first = await self._write(await run(marks.mark, chat), tenant_id, is_small=is_small)
        if await run(marks.strip, first) != plain:
            less = await run(partial(marks.mark, chat, self._special, but="assistant"))
            text = await self._write(less, tenant_id, is_small=is_small)
            if await run(marks.strip, text) == plain:
                return await run(marks.split, text)
        return await run(marks.split, first)

    async def _write(self, chat: Chat, tenant_id: str, *, is_small: bool) -> str:
        # options may be anything, and a template may count with them
        if self._here is not None and is_small and not chat.options:
            return self._here.render(chat)
        task = RenderTask(self._code, chat, self.special_tokens)
        return await self._sandbox.render(task, tenant_id=tenant_id)


async def _run_here(work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    """Do at once what takes no time."""
    return work(*args, **kwargs)


async def _run_in_thread(work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    """Do the rest off the loop."""
    return await run_in_thread(partial(work, *args, **kwargs))
