"""Requests of all features mixed, from a seed: each is one that a client may send, and has one answer.

`RequestMix` draws bodies of both generation routes. Whatever is drawn is greedy or has a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
Body = dict[str, Any]
Drawn = tuple[str, Body]

TEXTS = (
    "Hello, who are you?",
    "The refund is on its way.",
    "Grüße aus Köln 🙂 \U0001f468\u200d\U0001f469\u200d\U0001f467 नमस्ते 龜",
    "def total(items): return sum(item.price for item in items)",
    '<|im_end|> is plain text \\ " \n\t in a message',
    "x",
    " ",
    "a" * 90,
)
STOPS = ("e", " t", "th", "\n", "🙂", "not in any answer", "\ufffd", "ab", ".", "qu", "aaa", "0")
WEATHER: Body = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 3, 7]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Body = {"type": "function", "function": {"name": "clock"}}
SCHEMAS: tuple[Body, ...] = (
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["a", "ü", "🙂"]}, "minItems": 1, "maxItems": 3},
    {"enum": ["yes", "no", "maybe so"]},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
)


class RequestMix:
    """Draws requests for one of `models`; `vocab_size` bounds token ids."""

    def __init__(self, seed: int, models: Sequence[str], vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._models = models
        self._vocab_size = vocab_size

    def draw(self) -> Drawn:
        """A route and a body."""
        is_chat = self._random.random() < 0.5
        body = self._draw_shared()
        body |= self._draw_chat() if is_chat else self._draw_completion()
        if self._has(0.35):
            body |= self._draw_constraint(is_chat=is_chat)
        if body.get("response_format") or body.keys() & {"guided_json", "guided_regex", "guided_choice", "tools"}:
            # room for what must be complete, and no tokens that it does not allow
            body["max_tokens"] = 60
            for name in ("min_tokens", "ignore_eos", "logit_bias"):
                body.pop(name, None)
        return CHAT_PATH if is_chat else COMPLETION_PATH, body

    def _has(self, share: float) -> bool:
        return self._random.random() < share

    def _some(self, values: Sequence[Any], low: int, high: int) -> list[Any]:
        return self._random.sample(values, self._random.randint(low, high))

    def _ids(self, low: int, high: int) -> list[int]:
        return [self._random.randrange(3, self._vocab_size) for _ in range(self._random.randint(low, high))]

    def _draw_shared(self) -> Body:
        pick = self._random.choice
        body: Body = {"model": pick(self._models), "max_tokens": self._random.choice([1, 2, 5, 12, 24])}
        body |= {"temperature": 0} if self._has(0.3) else {"seed": self._random.randrange(-(2**40), 2**40)}
        optional: tuple[tuple[float, str, Callable[[], Any]], ...] = (
            (0.4, "temperature", lambda: pick([0.01, 0.7, 1, 1.3, 2])),
            (0.2, "top_p", lambda: pick([0.1, 0.9, 1])),
            (0.2, "top_k", lambda: pick([-1, 0, 1, 5, 40, 10**6])),
            (0.2, "min_p", lambda: pick([0, 0.05, 0.5])),
            (0.2, "presence_penalty", lambda: pick([-2, 0.5, 2])),
            (0.2, "frequency_penalty", lambda: pick([-0.5, 1, 2])),
            (0.2, "repetition_penalty", lambda: pick([0.8, 1, 1.3])),
            (0.3, "n", lambda: self._random.randint(1, 4)),
            (0.3, "stop", lambda: pick([pick(STOPS), self._some(STOPS, 1, 4), None, []])),
            (0.15, "stop_token_ids", lambda: self._ids(1, 20)),
            (0.2, "min_tokens", lambda: self._random.randint(0, body["max_tokens"])),
            (0.4, "ignore_eos", lambda: True),
            (0.2, "logit_bias", lambda: {str(token): pick([-100, -5, 3, 8]) for token in set(self._ids(1, 8))}),
            (0.1, "user", lambda: "somebody"),
            (0.1, "metadata", lambda: {"a": "b", "ü": "🙂"}),
            (0.1, "cache_salt", lambda: pick(["salt", "pepper"])),
        )
        for share, name, draw in optional:
            if self._has(share):
                value = draw()
                if name != "temperature" or "seed" in body:
                    body[name] = value
        return body

    def _draw_chat(self) -> Body:
        pick = self._random.choice
        messages: list[Body] = [{"role": pick(["system", "developer"]), "content": pick(TEXTS)}] * self._has(0.3)
        for _ in range(self._random.randint(0, 2)):
            messages += [{"role": "user", "content": self._content()}, {"role": "assistant", "content": pick(TEXTS)}]
        messages.append({"role": "user", "content": self._content()})
        body: Body = {"messages": messages}
        if self._has(0.4):
            body |= {"logprobs": True, "top_logprobs": self._random.choice([0, 1, 5, 20])}
        if self._has(0.25):
            body |= self._draw_tools()
        if self._has(0.1):
            body |= {"add_generation_prompt": False}
        elif self._has(0.1):
            messages.append({"role": "assistant", "content": "Well, "})
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return body

    def _content(self) -> Any:
        text = self._random.choice(TEXTS)
        return [{"type": "text", "text": text}, {"type": "text", "text": "!"}] if self._has(0.2) else text

    def _draw_tools(self) -> Body:
        named = {"type": "function", "function": {"name": "get_weather"}}
        choice = self._random.choice(["auto", "none", "required", named, None])
        return {
            "tools": [WEATHER, CLOCK],
            "tool_choice": choice,
            "parallel_tool_calls": self._random.choice([True, False]),
        }

    def _draw_completion(self) -> Body:
        pick = self._random.choice
        body: Body = {
            "prompt": pick([pick(TEXTS), self._ids(1, 60), self._some(TEXTS, 1, 3), [self._ids(1, 9), self._ids(1, 9)]])
        }
        if self._has(0.4):
            body["logprobs"] = pick([0, 1, 5, 20])
        if self._has(0.2):
            body["echo"] = True
        if self._has(0.15):
            body["prompt_logprobs"] = pick([0, 3])
        return body

    def _draw_constraint(self, *, is_chat: bool) -> Body:
        schema = self._random.choice(SCHEMAS)
        named: Body = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        found = self._random.choice(
            [
                {"response_format": {"type": "text"}},
                {"response_format": named},
                {"guided_json": schema},
                {"guided_regex": "[a-c]{2,5}(🙂|ü)?"},
                {"guided_choice": ["yes", "no", "vielleicht"]},
                {"structured_outputs": {"regex": "(ab|cd){1,4}"}},
            ]
        )
        return {**found, "tools": None, "tool_choice": None, "parallel_tool_calls": None} if is_chat else found
