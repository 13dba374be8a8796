"""From checked requests to token ids: chat messages or prompts, tokenised off the loop when long, within the context.

`PromptReader` owns the one worker thread of the tokenizer, which takes long texts of one tenant after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from loraplex_engine.errors import ContextLengthError, InvalidRequestError
from loraplex_engine.server.chat_input import ChatInput, build_chat, is_large
from loraplex_engine.server.echo import PromptPart, read_echo
from loraplex_engine.server.sandbox.turn import Turns
from loraplex_engine.server.template import Template
from loraplex_engine.server.thread import run_in_thread
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.wire import openai

_Result = TypeVar("_Result")
DEFAULT_COMPLETION_TOKENS = 16
# below this tokenising takes less than a step; above it goes to the thread
_LONG_TEXT_CHARS = 8192
# as long as requests wait in the core
_MAX_QUEUE_S = 60.0
_MAX_SHOWN = 10**15


class PromptReader:
    """Tokenises prompts for a model with `max_model_len` positions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._turns = Turns(1, _MAX_QUEUE_S)

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read_chat(
        self, template: Template, chat: ChatInput, max_model_len: int, *, tenant_id: str = ""
    ) -> list[int]:
        """Return the ids of a chat, as `template` writes it.

        Raises:
            InvalidRequestError: The template refuses the chat or writes nothing, or it is surely too long.
            NotReadyError: There was no place to render or to tokenise it in time.
        """
        build = partial(build_chat, chat, template.facts, template.special_tokens)
        built = await run_in_thread(build) if is_large(chat) else build()
        pieces = await template.render(built, tenant_id=tenant_id)
        text = "".join(piece or "" for piece in pieces)
        self._check_bound(text, max_model_len, "messages")
        ids = await self._run(len(text), lambda: self._tokenizer.encode_chat(pieces, limit=max_model_len), tenant_id)
        if not ids:
            raise InvalidRequestError("The model's chat template makes nothing of these messages.", param="messages")
        return ids

    async def read_text(
        self, text: str, max_model_len: int, *, add_special_tokens: bool = True, tenant_id: str = ""
    ) -> list[int]:
        """Return the ids of one textual prompt. Raises as above."""
        return await self._read_text(text, len(text), max_model_len, tenant_id, add_special_tokens=add_special_tokens)

    async def read_prompts(
        self, prompt: str | list[Any], max_model_len: int, *, tenant_id: str = ""
    ) -> list[list[int]]:
        """Return the ids of each prompt of a completion: text, ids, or a list of either. Raises as above."""
        items = _list_prompts(prompt)
        size = _count_chars(items)
        return [
            await self._read_text(item, size, max_model_len, tenant_id)
            if isinstance(item, str)
            else [int(token) for token in item]
            for item in items
        ]

    async def read_echoes(
        self, prompt: str | list[Any], ids: Sequence[list[int]], *, has_scores: bool, tenant_id: str = ""
    ) -> list[PromptPart]:
        """Return what is echoed of each prompt, whose ids are known."""
        items = _list_prompts(prompt)
        size = _count_chars(items)
        texts = [item if isinstance(item, str) else None for item in items]
        return [
            await self._run(size, partial(read_echo, self._tokenizer, text, item, has_scores=has_scores), tenant_id)
            for text, item in zip(texts, ids, strict=True)
        ]

    async def _read_text(
        self, text: str, size: int, max_model_len: int, tenant_id: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        self._check_bound(text, max_model_len, "prompt")
        encode = partial(self._tokenizer.encode_prompt, text, add_special_tokens=add_special_tokens)
        return await self._run(size, encode, tenant_id)

    def _check_bound(self, text: str, max_model_len: int, param: str) -> None:
        """Refuse what cannot fit without tokenising it, so that hostile bodies cost nothing."""
        least = self._tokenizer.min_tokens(text)
        if least > max_model_len:
            raise ContextLengthError(
                f"This model's context is {max_model_len} tokens, but the prompt has at least {least}.", param=param
            )

    async def _run(self, size: int, work: Callable[[], _Result], tenant_id: str) -> _Result:
        """Do what is part of so many characters: at once, or in the thread when the tenant has its turn."""
        if size <= _LONG_TEXT_CHARS:
            return work()
        async with self._turns.take(tenant_id):
            return await run_in_thread(work, self._thread)


def _count_chars(items: Sequence[str | list[int]]) -> int:
    return sum(len(item) for item in items if isinstance(item, str))


def _list_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(_is_id(item) for item in prompt):
        return [prompt]
    if not 1 <= len(prompt) <= openai.MAX_PROMPTS:
        raise InvalidRequestError(f"`prompt` may be 1 to {openai.MAX_PROMPTS} prompts.", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) and all(_is_id(token) for token in item) for item in prompt):
        return prompt
    raise InvalidRequestError(
        "`prompt` must be text, a list of token ids, a list of texts, or a list of lists of token ids.", param="prompt"
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError unless all are in the vocabulary, and a prompt has at least one."""
    if not ids and param in ("prompt", "messages"):
        raise InvalidRequestError(f"`{param}` must have at least one token.", param=param)
    if any(not 0 <= token < vocab_size for token in ids):
        raise InvalidRequestError(f"`{param}` may hold token ids from 0 to {vocab_size - 1}.", param=param)


def fit_max_tokens(
    num_prompt_tokens: int,
    max_tokens: int | None,
    max_model_len: int,
    *,
    default: int | None,
    param: str,
    asked_by: str | None = "max_tokens",
) -> int:
    """Return how many tokens may be generated.

    Args:
        num_prompt_tokens: Of the longest prompt.
        max_tokens: What the client asked for; None takes the default, as far as it fits.
        max_model_len: Prompt and answer together.
        default: None = the rest of the context.
        param: The field to name: `messages` or `prompt`.
        asked_by: The field that asks for `max_tokens`.

    Raises:
        ContextLengthError: They do not fit; both counts are in the message.
    """
    rest = max_model_len - num_prompt_tokens
    if rest < (0 if max_tokens == 0 else 1):
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens, prompt and answer together, but the prompt alone has "
            f"{num_prompt_tokens}; shorten it.",
            param=param,
        )
    if max_tokens is None:
        return rest if default is None else min(default, rest)
    if max_tokens > rest:
        asked = f"{max_tokens}" if max_tokens < _MAX_SHOWN else "far more"
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens, but the prompt has {num_prompt_tokens} and `{asked_by}` "
            f"asks for {asked}; lower it to {rest} or less, or shorten the prompt.",
            param=param,
        )
    return max_tokens
