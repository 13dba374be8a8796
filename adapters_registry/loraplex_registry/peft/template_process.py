"""Renders one chat with a template that a tenant wrote, as the engine will: `python -m` this, or a fork of the checks.

Reads a `RenderJob` as JSON and writes a `RenderAnswer`; the kernel ends it when it takes more than it may.
"""

from __future__ import annotations

import sys
from typing import Any, BinaryIO

import jinja2
import msgspec

from loraplex_registry.peft.limit import MAX_CPU_S, limit_processor, limit_task
from loraplex_registry.peft.template_environment import build_environment
from loraplex_registry.peft.template_facts import find_facts

MAX_PROMPT_CHARS = 8 << 20
_MAX_REASON_CHARS = 200


class RenderJob(msgspec.Struct, frozen=True):
    """A template, the chat's only message, and the names of special tokens that it may use."""

    source: str
    content: str
    special_tokens: dict[str, str]


class RenderAnswer(msgspec.Struct, frozen=True):
    """The number of characters it made, or what is wrong, as the end of a sentence that begins with the file's name."""

    num_chars: int = 0
    fault: str = ""


def run(reader: BinaryIO, writer: BinaryIO) -> None:
    """Answer one job within limits."""
    limit_task(MAX_CPU_S)
    job = msgspec.json.decode(reader.read(), type=RenderJob)
    answer = msgspec.json.encode(render(job))
    # what was allowed is spent on the template, not on the way back
    limit_processor(0)
    writer.write(answer)


def render(job: RenderJob) -> RenderAnswer:
    """Return what becomes of the job, in this process."""
    try:
        environment = build_environment()
        facts = find_facts(environment.parse(job.source))
        template = environment.from_string(job.source)
    except (jinja2.TemplateError, RecursionError, MemoryError, ValueError) as error:
        return RenderAnswer(fault=f"is not a template: {_describe(error)}")
    content: Any = [{"type": "text", "text": job.content}] if facts.needs_parts else job.content
    try:
        text = template.render(
            messages=[{"role": "user", "content": content}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **job.special_tokens,
        )
        text.encode()
    except MemoryError:
        return RenderAnswer(fault="takes more than 512 MiB of memory for a plain question of a user")
    # a template may fail in any way
    except Exception as error:  # noqa: BLE001
        return RenderAnswer(fault=f"cannot render a plain question of a user: {_describe(error)}")
    if not 0 < len(text) <= MAX_PROMPT_CHARS:
        what = "nothing" if not text else f"more than {MAX_PROMPT_CHARS} characters"
        return RenderAnswer(fault=f"writes {what} of a plain question of a user")
    return RenderAnswer(len(text))


def _describe(error: Exception) -> str:
    reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
    return ascii(reason)[1:-1][: 2 * _MAX_REASON_CHARS]


if __name__ == "__main__":
    run(sys.stdin.buffer, sys.stdout.buffer)
