"""`loraplex chat`: one message, or a conversation at a terminal; answers appear as they are made.

In a conversation Ctrl-C ends the answer that is being made; at the prompt it leaves. A line that begins with a slash
is a command and never goes to the model.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from loraplex.cli.output import AsJson, clean, print_json, say, stderr
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.client.inference import Answer, stream_chat
from loraplex.client.location import find_location

_LEAVE, _FORGET = ("/exit", "/quit"), "/reset"
_HINT = "/reset forgets, /exit or /quit leaves; a blank before the slash sends the line"


@dataclass(frozen=True)
class _Chat:
    """Where and how answers are asked for."""

    connection: Connection
    model: str
    options: dict[str, Any]

    def ask(self, messages: list[dict[str, str]], answer: Answer, *, show: bool) -> None:
        """Fill the answer to a conversation, printed as it arrives if `show`."""
        for piece in stream_chat(self.connection, self.model, messages, answer, **self.options):
            if show:
                sys.stdout.write(clean(piece))
                sys.stdout.flush()
        if show:
            sys.stdout.write("\n")


def chat(
    message: str | None = None,
    /,
    *,
    model: str,
    system: str | None = None,
    max_tokens: Annotated[int | None, Parameter(name="--max-tokens")] = None,
    temperature: float | None = None,
    seed: int | None = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a model: one message, or a conversation at a terminal (/reset forgets, /exit leaves).

    Args:
        message: What to say; without it, a conversation at a terminal, and all that comes from a pipe as one message.
        model: TENANT, TENANT/ADAPTER, TENANT/ADAPTER@ALIAS, ...@NUMBER, ...@sha256:DIGITS, or a base's name.
        system: What the model should know beforehand.
        max_tokens: Longest answer, tokens.
        temperature: 0 always takes the likeliest token.
        seed: Equal seeds give equal answers.
        as_json: Print the answer and its facts as JSON (needs MESSAGE).
    """
    location = find_location(os.environ)
    location.require_key()
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None and not message.strip():
        raise ClientError("The message is empty: loraplex chat --model NAME 'Hello!'", code="no_message")
    if as_json and message is None:
        raise ClientError("--json needs a message: loraplex chat --model NAME --json 'Hello!'", code="no_message")
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    start = [{"role": "system", "content": system}] if system else []
    with Connection(location) as connection:
        conversation = _Chat(connection, model, options)
        if message:
            answer = Answer()
            conversation.ask([*start, {"role": "user", "content": message}], answer, show=not as_json)
            _tell(answer, as_json=as_json)
        else:
            _converse(conversation, start)


def _converse(conversation: _Chat, start: list[dict[str, str]]) -> None:
    """Ask and answer until the reader leaves; a refused message is forgotten and the conversation goes on."""
    messages = list(start)
    say(f"{conversation.model}: Ctrl-C ends an answer, /reset forgets, /exit or Ctrl-D leaves.")
    while (line := _read_line()) is not None:
        if line == _FORGET:
            messages = list(start)
        elif line.startswith("/"):
            say(f"There is no command {line.split()[0]}: {_HINT}.")
        elif line:
            messages += _exchange(conversation, messages, line.strip())


def _exchange(conversation: _Chat, messages: list[dict[str, str]], line: str) -> list[dict[str, str]]:
    """Return what was said: the line and its answer as far as it came, or nothing where none came."""
    asked, answer = {"role": "user", "content": line}, Answer()
    try:
        conversation.ask([*messages, asked], answer, show=True)
    except ClientError as error:
        say(f"error: {error.message}")
        return []
    except KeyboardInterrupt:
        say("\n(ended; Ctrl-C once more leaves)")
        return [asked, {"role": "assistant", "content": answer.text}] if answer.text else []
    _tell(answer, as_json=False)
    return [asked, {"role": "assistant", "content": answer.text}]


def _read_line() -> str | None:
    """Return what the reader typed, with the blanks before it; None to leave."""
    try:
        line = stderr().input("[bold]> [/bold]").rstrip()
    except EOFError:
        return None
    return None if line in _LEAVE else line


def _tell(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        facts = {name: value for name, value in vars(answer).items() if not name.startswith("_")}
        print_json(facts)
        return
    if answer.is_cut:
        stderr().print(f"[cut off at {answer.completion_tokens} tokens]", style="dim", markup=False)
    stderr().print(
        f"{answer.model}  {answer.short_digest}  {answer.prompt_tokens} + {answer.completion_tokens} tokens, "
        f"first after {answer.first_token_s:.2f} s, {answer.total_s:.2f} s in all",
        style="dim",
        markup=False,
        soft_wrap=True,
    )
