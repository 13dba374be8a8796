"""Token ids of prompts: the base's `tokenizer.json` and chat template, read as `transformers` reads them.

`Tokenizer` is read-only after it is made and may be used from a worker thread. In messages the text of a special token
is plain text; in a completion's prompt it is the special token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import tokenizers

from loraplex_engine.errors import BaseUnsupportedError, InvalidRequestError
from loraplex_engine.server.chat_template import Chat, ChatTemplate, CompiledTemplate, compile_template
from loraplex_engine.server.detokenizer import TokenTable, build_token_table

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
# a normaliser may make text shorter (composed characters): at most by this factor
_NORMALISER_SHRINKS = 4

Message = Mapping[str, Any]


class Tokenizer:
    """Encodes prompts for one base."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        parsed = msgspec.json.decode(text)
        config = _read_json(folder / "tokenizer_config.json")
        self._named = _named_tokens(config, _read_json(folder / "special_tokens_map.json"))
        self._tokenizer = _build_tokenizer(text, self._named)
        self.table: TokenTable = build_token_table(parsed)
        compiled = _compile_base(folder, config)
        self._facts = compiled.facts if compiled is not None else None
        self._template = ChatTemplate(compiled.code, self._named) if compiled is not None else None
        self._control = self._build_control_pattern()
        self._newline_ids = self._encode("\n")
        shrink = _NORMALISER_SHRINKS if self._tokenizer.normalizer is not None else 1
        self._most_bytes_per_token = self.table.longest_token_bytes * shrink

    @property
    def reads_names(self) -> bool:
        """Whether the chat template uses the `name` of a message."""
        return self._facts is not None and self._facts.reads_name

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens in `text`, without tokenising it."""
        return -(-len(text.encode()) // self._most_bytes_per_token)

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a completion's prompt; BOS as `tokenizer.json` says (transformers goes by it too)."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: Sequence[Message], *, limit: int, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a chat.

        Args:
            messages: Role and text of each; special tokens in the text are plain text.
            limit: Encoding may stop once more ids than this are there.
            add_generation_prompt: Whether the assistant's turn is opened.

        Raises:
            InvalidRequestError: There is no template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                "This base has no chat template; use /v1/completions with a whole prompt.", param="messages"
            )
        if not any(self._control.search(value) for message in messages for value in message.values()):
            chat = Chat([dict(message) for message in messages], add_generation_prompt=add_generation_prompt)
            return self._encode(self._template.render(chat))
        start, end = _unused_characters(messages)
        mark = f"{start}\\g<0>{end}"
        marked = [{key: self._control.sub(mark, value) for key, value in message.items()} for message in messages]
        text = self._template.render(Chat(marked, add_generation_prompt=add_generation_prompt))
        return self._encode_marked(text, start, end, limit)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # a batch of one, since only batches let go of the interpreter's lock
        return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def _encode_marked(self, text: str, start: str, end: str, limit: int) -> list[int]:
        """Encode a rendered chat whose marked control tokens are plain text; as transformers' `encode_marked_chat`."""
        pieces = re.split(f"{start}({self._control.pattern}){end}|[{start}{end}]", text)
        ids = self._encode(pieces[0])
        plain: dict[str, list[int]] = {}
        for index, piece in enumerate(pieces[1:], 1):
            if not piece or len(ids) > limit:
                continue
            if index % 2 == 0:
                ids += self._encode_inside(piece)
                continue
            if piece not in plain:
                plain[piece] = self._encode_control_as_text(piece)
            ids += plain[piece]
        return ids

    def _encode_control_as_text(self, token: str) -> list[int]:
        ids = self._encode_inside(token, is_plain=True)
        if self._tokenizer.token_to_id(token) in ids:
            raise InvalidRequestError(f"This model cannot read {token!r} as plain text.", param="messages")
        return ids

    def _encode_inside(self, piece: str, *, is_plain: bool = False) -> list[int]:
        """Encode text that does not begin the prompt: behind a newline, so that no prefix space is added."""
        encode = self._encode_plain if is_plain else self._encode
        ids = encode("\n" + piece)
        size = len(self._newline_ids)
        return ids[size:] if ids[:size] == self._newline_ids else encode(piece)

    def _encode_plain(self, text: str) -> list[int]:
        """Encode without looking for any added token."""
        backend = self._tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]

    def _build_control_pattern(self) -> re.Pattern[str]:
        """Match the special tokens and the added tokens that the template writes, longer ones first."""
        literal = self._facts.literal_text if self._facts is not None else ""
        control = [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special or (token.content in literal and not token.content.isspace())
        ]
        return re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    parsed: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return parsed


def _named_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    found = {name: config.get(name) or legacy.get(name) for name in _NAMED_TOKENS}
    return {
        name: value["content"] if isinstance(value, dict) else str(value)
        for name, value in found.items()
        if value is not None
    }


def _build_tokenizer(text: str, named: Mapping[str, str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in named.values() if token not in added and backend.token_to_id(token) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in missing])
    return backend


def _compile_base(folder: Path, config: Mapping[str, Any]) -> CompiledTemplate | None:
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):
        source = {item["name"]: item["template"] for item in source}.get("default")
    if source is not None and not isinstance(source, str):
        raise BaseUnsupportedError("The base's chat template is neither text nor a list with a `default`.")
    if source is None:
        return None
    try:
        return compile_template(source)
    except jinja2.TemplateError as error:
        raise BaseUnsupportedError(f"The base's chat template cannot be read: {error}") from error


def _unused_characters(messages: Sequence[Message]) -> tuple[str, str]:
    """Return two private characters that no message holds."""
    used = {ord(char) for message in messages for value in message.values() for char in value}
    free = (chr(code) for code in _PRIVATE_USE if code not in used)
    return next(free), next(free)
