"""What the sandbox is asked and what it answers, as JSON and msgpack over one socket per task."""

from __future__ import annotations

from typing import Any

import msgspec

from loraplex_engine.server.chat_template import Chat
from loraplex_engine.server.constraint.task import ChoiceTask, LarkTask, RegexTask, SchemaTask
from loraplex_registry.peft.template_facts import TemplateFacts

MAX_ANSWER_BYTES = 16 << 20
BEGUN = b"+"
"""What a task's process sends before it reads the task."""


class InspectTask(msgspec.Struct, frozen=True, tag="inspect"):
    """Compile a chat template and say what it reads."""

    source: str
    param: str = "messages"


class RenderTask(msgspec.Struct, frozen=True, tag="render"):
    """Render a chat; `code` is what inspecting the same template returned."""

    code: bytes
    chat: Chat
    special_tokens: dict[str, str]
    param: str = "messages"


class Inspected(msgspec.Struct, frozen=True, tag="inspected"):
    """A template as code that `RenderTask` takes, which only the sandbox may load."""

    facts: TemplateFacts
    code: bytes


class Text(msgspec.Struct, frozen=True, tag="text"):
    """The prompt of a chat, or a compiled grammar."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why the task cannot be done: the client's fault."""

    message: str
    param: str | None = None
    code: str = "invalid_request_error"


Task = InspectTask | RenderTask | SchemaTask | RegexTask | ChoiceTask | LarkTask
Answer = Inspected | Text | Refused

# JSON, since whole numbers in schemas and calls may have any size
encode_task = msgspec.json.Encoder().encode
decode_task: Any = msgspec.json.Decoder(Task).decode
encode_answer = msgspec.msgpack.Encoder().encode
