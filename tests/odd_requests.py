"""Requests that no sane client sends, from a seed: wrong types and values, bytes that are no JSON, no HTTP, or no end.

`OddMix` takes good bodies from a `RequestMix` and spoils them. An `Odd` says what may come back: what is spoiled in a
body's fields is answered, refused by name, or fine after all; it never breaks anything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from byte_client import LEAVES, build_request
from odd_values import (
    GRAMMARS,
    HEADERS,
    LARGE,
    LONG,
    MESSAGES,
    METHODS,
    NAMES,
    PATHS,
    PATTERNS,
    SCHEMA_PARTS,
    TAILS,
    TOOLS,
    VALUES,
)
from random_requests import CHAT_PATH, COMPLETION_PATH, RequestMix

TOKENIZE_PATH = "/v1/tokenize"


@dataclass
class Odd:
    """Bytes to send in pieces of `piece`, and how to leave, if at all: after `leave_after` bytes of an answer."""

    kind: str
    data: bytes
    piece: int = 1 << 20
    leave: str | None = None
    leave_after: int = 0
    params: set[str] | None = None
    """The fields that a 400 may name, where it is a matter of fields."""
    note: str = field(default="", repr=False)


class OddMix:
    """Draws odd requests; `authorization` makes the header that lets them in."""

    def __init__(self, seed: int, good: RequestMix, authorization: Callable[[], str]) -> None:
        self._random = random.Random(seed)
        self._good = good
        self._authorization = authorization
        self._kinds: tuple[tuple[Callable[[], Odd], int], ...] = (
            (self._draw_field, 40),
            (self._draw_fields, 12),
            (self._draw_absent, 5),
            (self._draw_unknown, 5),
            (self._draw_messages, 10),
            (self._draw_constraint, 10),
            (self._draw_tools, 6),
            (self._draw_broken_json, 18),
            (self._draw_broken_bytes, 8),
            (self._draw_header, 10),
            (self._draw_target, 6),
            (self._draw_leaving, 12),
            (self._draw_cut, 5),
            (self._draw_good, 6),
            (self._draw_large, 1),
        )

    def draw(self) -> Odd:
        """One request."""
        draws, weights = zip(*self._kinds, strict=True)
        odd: Odd = self._random.choices(draws, weights)[0]()
        return odd

    def _body(self) -> tuple[str, dict[str, Any]]:
        """A good body that does not take long, often streamed; sometimes of the route that only tokenises."""
        path, body = self._good.draw()
        body["max_tokens"] = min(body["max_tokens"], 6)
        body.pop("min_tokens", None)
        if self._random.random() < 0.3:
            body["stream"] = True
        if self._random.random() < 0.1:
            path, body = TOKENIZE_PATH, {name: body[name] for name in ("model", "prompt", "messages") if name in body}
        return path, body

    def _build(self, kind: str, path: str, body: dict[str, Any], params: set[str] | None = None, **fields: Any) -> Odd:
        data = json.dumps(body).encode()
        return Odd(kind, self._wrap(path, data), params=params, note=data[:2000].decode("latin-1"), **fields)

    def _wrap(self, path: str, data: bytes, headers: dict[str, str] | None = None, **options: Any) -> bytes:
        return build_request(path, data, {"authorization": self._authorization(), **(headers or {})}, **options)

    def _draw_field(self) -> Odd:
        path, body = self._body()
        name = self._random.choice(NAMES)
        body[name] = self._random.choice(VALUES)
        return self._build("field", path, body, {*body, "prompt", "messages"})

    def _draw_fields(self) -> Odd:
        path, body = self._body()
        for name in self._random.sample(NAMES, 4):
            body[name] = self._random.choice(VALUES)
        return self._build("fields", path, body, {*body, "prompt", "messages"})

    def _draw_absent(self) -> Odd:
        path, body = self._body()
        # an answer without an end would take long
        del body[self._random.choice([name for name in body if name != "max_tokens"])]
        if self._random.random() < 0.3:
            path = self._random.choice([CHAT_PATH, COMPLETION_PATH, TOKENIZE_PATH])
        return self._build("absent", path, body, {*body, "prompt", "messages", "model"})

    def _draw_unknown(self) -> Odd:
        path, body = self._body()
        name = self._random.choice(
            ["foo", "", "$.model", "Model", "max-tokens", "ü", "🙂", LONG, "a\nb", "__class__", "`x`"]
        )
        body[name] = self._random.choice(VALUES)
        return self._build("unknown", path, body, {*body, name[:64]})

    def _draw_messages(self) -> Odd:
        path, body = self._body()
        path = CHAT_PATH if path == COMPLETION_PATH else path
        body.pop("prompt", None)
        messages = body.setdefault("messages", [{"role": "user", "content": "x"}])
        for _ in range(self._random.randint(1, 3)):
            messages.insert(self._random.randint(0, len(messages)), self._random.choice(MESSAGES))
        return self._build("messages", path, body, set(body))

    def _draw_constraint(self) -> Odd:
        path, body = self._body()
        pick = self._random.choice
        schema = pick(SCHEMA_PARTS)
        if self._random.random() < 0.5:
            schema = {"type": "object", "properties": {"a": schema, "b": pick(SCHEMA_PARTS)}, "required": ["a"]}
        body |= pick(
            [
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": schema, "strict": True},
                    }
                },
                {"response_format": {"type": "json_schema", "json_schema": schema}},
                {"response_format": {"type": pick(VALUES)}},
                {"guided_json": schema},
                {"guided_json": json.dumps(schema)},
                {"guided_regex": pick(PATTERNS)},
                {"guided_grammar": pick(GRAMMARS)},
                {
                    "guided_choice": pick(
                        [["a"] * 2, ["", "x"], [LONG] * 5, [str(index) for index in range(3000)], ["🙂"]]
                    )
                },
                {
                    "structured_outputs": {
                        pick(["json", "regex", "choice", "grammar", "json_object", "x"]): pick(VALUES)
                    }
                },
                {"guided_json": schema, "guided_regex": "a"},
            ]
        )
        return self._build("constraint", path, body, set(body))

    def _draw_tools(self) -> Odd:
        path, body = self._body()
        path = CHAT_PATH if path == COMPLETION_PATH else path
        body.pop("prompt", None)
        body.setdefault("messages", [{"role": "user", "content": "x"}])
        pick = self._random.choice
        tool = pick(TOOLS)
        if self._random.random() < 0.5:
            tool = {
                "type": "function",
                "function": {"name": "f", "parameters": pick(SCHEMA_PARTS), "strict": pick([True, False, None])},
            }
        body["tools"] = [tool] * pick([1, 1, 2, 200])
        named = {"type": "function", "function": {"name": pick(["f", "g", ""])}}
        body["tool_choice"] = pick(["auto", "none", "required", named, pick(VALUES)])
        return self._build("tools", path, body, set(body))

    def _draw_broken_json(self) -> Odd:
        path, body = self._body()
        data = json.dumps(body, ensure_ascii=self._random.random() < 0.5).encode()
        spoil = self._random.choice(
            [
                lambda: data[: self._random.randrange(len(data))],
                lambda: data + self._random.choice(TAILS),
                lambda: self._random.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" \t\r\n", b"/* */"]) + data,
                lambda: data[:-1] + b',"model":"x"}',
                lambda: (
                    data[:-1]
                    + b',"seed":'
                    + self._random.choice([b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"01", b"+1", b".5"])
                    + b"}"
                ),
                lambda: (
                    data[:-1]
                    + b',"user":"'
                    + self._random.choice(
                        [b"\\ud83d", b"\\udc00\\ud83d", b"\\u0000", b"\xff", b"\xed\xa0\x80", b"\\x", b"\n"]
                    )
                    + b'"}'
                ),
                lambda: (
                    data[:-1]
                    + b',"foo":'
                    + self._random.choice([b"[", b'{"a":']) * self._random.choice([70, 5000, 100_000])
                    + b"}"
                ),
                lambda: data.replace(b'"', b"'"),
                lambda: self._random.choice([b"", b"null", b"[]", b'"x"', b"5", b"{}", b"[{}]", b"\0" * 50]),
            ]
        )
        broken = spoil()
        return Odd("json", self._wrap(path, broken), note=broken[:2000].decode("latin-1"))

    def _draw_broken_bytes(self) -> Odd:
        """Some bytes of the whole request are others; it may wait for more, so the client goes."""
        path, body = self._body()
        data = bytearray(self._wrap(path, json.dumps(body).encode()))
        for _ in range(self._random.randint(1, 6)):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return Odd("bytes", bytes(data), leave="half", leave_after=-1, note=bytes(data[:2000]).decode("latin-1"))

    def _draw_header(self) -> Odd:
        path, body = self._body()
        name, value = self._random.choice(HEADERS)
        data = self._wrap(path, json.dumps(body).encode(), {name: value.encode().decode("latin-1")})
        return Odd("header", data, leave="half", leave_after=-1, note=f"{name}: {value}")

    def _draw_target(self) -> Odd:
        path, body = self._body()
        method = "POST"
        if self._random.random() < 0.6:
            path = self._random.choice(PATHS)
        else:
            method = self._random.choice(METHODS)
        version = self._random.choice(["1.1", "1.1", "1.0", "2.0", "9"])
        data = self._wrap(path, json.dumps(body).encode(), method=method, version=version)
        return Odd("target", data, leave="half", leave_after=-1, note=f"{method} {path[:100]} {version}")

    def _draw_leaving(self) -> Odd:
        path, body = self._body()
        body |= {"max_tokens": 40, "ignore_eos": True} if path != TOKENIZE_PATH else {}
        after = self._random.choice([0, 0, 20, 400, 2000])
        return self._build("leaving", path, body, set(body), leave=self._random.choice(LEAVES), leave_after=after)

    def _draw_cut(self) -> Odd:
        path, body = self._body()
        data = self._wrap(path, json.dumps(body).encode())
        cut = data[: self._random.randrange(len(data))]
        return Odd("cut", cut, self._random.choice([7, 1 << 20]), self._random.choice(LEAVES), -1)

    def _draw_good(self) -> Odd:
        path, body = self._body()
        odd = self._build("good", path, body, set(body))
        odd.piece = self._random.choice([50, 1000])
        return odd

    def _draw_large(self) -> Odd:
        pick = self._random.choice
        path, body = self._body()
        body |= pick(LARGE)
        data = json.dumps(body, ensure_ascii=False).encode()
        return Odd(
            "large", self._wrap(path, data), params={*body, "prompt", "messages"}, note=data[:300].decode("latin-1")
        )
