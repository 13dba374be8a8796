"""Asking several models the same thing at the same moment."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

from loraplex.client.connection import Connection
from loraplex.client.inference import Answer, stream_chat
from loraplex.client.location import Location


@dataclass(frozen=True)
class Asker:
    """A model and the key that may call it."""

    model: str
    key: str = field(repr=False)


def ask_all(url: str, askers: Sequence[Asker], question: str, max_tokens: int) -> list[Answer]:
    """Return the likeliest answer of each model, all asked at once, in the order of `askers`.

    Raises:
        ClientError: One was refused or broke off.
    """
    start = Barrier(len(askers))

    def ask(asker: Asker) -> Answer:
        with Connection(Location(url, asker.key, is_direct=True)) as connection:
            start.wait()
            answer = Answer()
            messages = [{"role": "user", "content": question}]
            options = {"temperature": 0, "max_tokens": max_tokens}
            for _ in stream_chat(connection, asker.model, messages, answer, **options):
                pass
            return answer

    with ThreadPoolExecutor(len(askers)) as pool:
        return list(pool.map(ask, askers))
