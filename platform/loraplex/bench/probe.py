"""The first two requests: whether the server can be measured at all, and how many tokens it counts for words."""

from __future__ import annotations

import random
from dataclasses import replace

from loraplex.bench.client import Client, Server
from loraplex.bench.errors import BenchError
from loraplex.bench.load import run_in_loop
from loraplex.bench.outcome import Outcome
from loraplex.bench.text import Text
from loraplex.bench.workload import Request, Workload

_SHORT, _LONG = 16, 80
_BAD_REQUEST = ("400", "422")


def probe(server: Server, workload: Workload, text: Text, timeout_s: float) -> Text:
    """Ask for two short answers and return the words weighed by what the server counted.

    Raises:
        BenchError: It does not answer, refuses, or counts no tokens.
    """
    tokens = []
    for num_words in (_SHORT, _LONG):
        prompt = replace(text, tokens_per_word=1.0).make(num_words, random.Random(num_words))  # noqa: S311 - no secret
        model = workload.models[0]
        request = Request(model, workload.build_body(model, prompt, 2))
        tokens.append(_ask(server, workload.path, request, timeout_s).prompt_tokens)
    fitted = text.fit(_SHORT, tokens[0], _LONG, tokens[1])
    if text.is_exact and fitted.tokens_per_word != 1:
        raise BenchError(
            f"The server counts {fitted.tokens_per_word:.2f} tokens where --tokenizer has one: it is another's.",
            param="tokenizer",
        )
    return replace(fitted, is_exact=text.is_exact)


def _ask(server: Server, path: str, request: Request, timeout_s: float) -> Outcome:
    async def send() -> Outcome:
        client = Client(server, path, timeout_s)
        try:
            return await client.send(request, 0.0)
        finally:
            client.close()

    outcome = run_in_loop(send())
    if not outcome.error:
        return outcome
    advice = ""
    if outcome.error.startswith(_BAD_REQUEST):
        advice = " Servers that do not know ignore_eos need --no-ignore-eos; chat models may need --chat."
    elif outcome.error == "no_usage":
        advice = " It has to answer stream_options.include_usage."
    raise BenchError(f"{server.url} does not answer the first request: {outcome.error}: {outcome.message}{advice}")
