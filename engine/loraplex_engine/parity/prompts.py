"""The golden prompts of one adapter: the base's texts with the tokens that the adapter looks for among them."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_TRAINED = 16
"""Tokens with rows of their own that are tried, spread over all prompts."""


def build_prompts(
    texts: Sequence[Sequence[int]], invocation_ids: Sequence[int], trained_ids: Sequence[int], max_len: int
) -> list[list[int]]:
    """Token ids of the prompts for an adapter; empty texts are left out.

    Args:
        texts: of the golden texts, by the base's tokenizer.
        invocation_ids: tokens from which on the adapter acts; put where a third of each text is behind.
        trained_ids: tokens whose rows the adapter replaces; some of them stand after the invocation, in turns.
        max_len: longest prompt that the engine takes.
    """
    step = max(1, -(-len(trained_ids) // _MAX_TRAINED))
    tried = list(trained_ids[::step])
    whole = [text for text in texts if text]
    prompts = []
    for number, text in enumerate(whole):
        third = max(1, len(text) // 3)
        own = tried[number :: len(whole)]
        room = max_len - len(invocation_ids) - len(own)
        head, tail = list(text[:third])[: max(0, room)], list(text[third:])[: max(0, room - third)]
        prompts.append([*head, *invocation_ids, *own, *tail][:max_len])
    return prompts


def find_start(prompt: Sequence[int], invocation_ids: Sequence[int]) -> int:
    """Position from which on an adapter acts: its invocation's last occurrence; 0 without one.

    Raises:
        ValueError: The prompt lacks it.
    """
    wanted = tuple(invocation_ids)
    last = len(prompt) - len(wanted)
    for start in range(last, -1, -1) if wanted else ():
        if tuple(prompt[start : start + len(wanted)]) == wanted:
            return start
    if wanted:
        raise ValueError("the prompt lacks the invocation")
    return 0
