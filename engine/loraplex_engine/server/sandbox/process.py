"""The sandbox's process, `python -m loraplex_engine.server.sandbox.process FD`: one fork for each task.

It imports everything once and never reads a task itself: FD brings the socket of each task, a fork takes the task from
it, answers and ends. So no task can leave anything behind for the next one, and the kernel ends those that take too
much. One byte says that the fork has begun; then comes the answer, or nothing.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import Any

import jinja2

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.chat_template import ChatTemplate, compile_template
from loraplex_engine.server.constraint.compile import compile_grammar, warm
from loraplex_engine.server.constraint.task import RegexTask
from loraplex_engine.server.sandbox.task import (
    BEGUN,
    MAX_ANSWER_BYTES,
    Answer,
    Inspected,
    InspectTask,
    Refused,
    RenderTask,
    Text,
    decode_task,
    encode_answer,
)
from loraplex_registry.peft.limit import (
    MAX_CPU_S,
    MAX_REGEX_CPU_S,
    die_with_parent,
    limit_processor,
    limit_task,
)

_CHUNK_BYTES = 1 << 20
_MAX_REASON_CHARS = 300


def main() -> int:
    """Fork for each socket that arrives, until the front is gone."""
    die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    warm()
    # children that have ended leave no trace
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return 0
        with socket.socket(fileno=descriptors[0]) as task:
            try:
                is_child = os.fork() == 0
            except OSError:
                continue
            if is_child:
                control.close()
                _answer_and_end(task)


def _answer_and_end(connection: socket.socket) -> None:
    try:
        limit_task(MAX_CPU_S)
        connection.sendall(BEGUN)
        answer = _make_answer(decode_task(_read_all(connection)))
        # what was allowed is spent on the work, not on the way back
        limit_processor(0)
        connection.sendall(answer)
    finally:
        os._exit(0)


def _make_answer(task: Any) -> bytes:
    """Return the bytes of an answer to any task: nothing says that the kernel has ended it, so that is not for here."""
    try:
        answer = encode_answer(run_task(task))
    except MemoryError:
        return encode_answer(_refuse(task, "It takes too much memory."))
    except UnicodeEncodeError:
        return encode_answer(_refuse(task, "It holds half of a character (a lone surrogate), which is no text."))
    # a task runs what clients wrote, and they wait for an answer
    except Exception as error:  # noqa: BLE001
        return encode_answer(_refuse(task, f"What prepares this ended unexpectedly ({type(error).__name__})."))
    if len(answer) > MAX_ANSWER_BYTES:
        return encode_answer(_refuse(task, f"What is made of this has more than {MAX_ANSWER_BYTES >> 20} MiB."))
    return answer


def _read_all(connection: socket.socket) -> bytes:
    chunks = []
    while chunk := connection.recv(_CHUNK_BYTES):
        chunks.append(chunk)
    return b"".join(chunks)


def run_task(task: Any) -> Answer:
    """Return the answer to one task, in this process."""
    try:
        if isinstance(task, InspectTask):
            compiled = compile_template(task.source)
            return Inspected(compiled.facts, compiled.dump())
        if isinstance(task, RenderTask):
            return Text(ChatTemplate.load(task.code, task.special_tokens).render(task.chat))
        if isinstance(task, RegexTask):
            limit_processor(MAX_REGEX_CPU_S)
        return Text(compile_grammar(task))
    except InvalidRequestError as error:
        return Refused(str(error), error.param, error.code)
    except jinja2.TemplateError as error:
        return _refuse(task, f"The model's chat template cannot be read: {error}")
    except RecursionError:
        return _refuse(task, "It is nested too deeply.")
    except MemoryError:
        return _refuse(task, "It takes too much memory.")


def _refuse(task: Any, reason: str) -> Refused:
    return Refused(reason[:_MAX_REASON_CHARS].encode(errors="replace").decode(), task.param)


if __name__ == "__main__":
    sys.exit(main())
