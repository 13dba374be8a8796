"""Samples requests. `Sampler` is the only writer of what it prepares per request, which goes when the request goes.

A request's token depends on its own logits, parameters and random number, never on its neighbours, nor on how often it
was preempted: all that it keeps between steps follows from the request's own tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from loraplex_engine.core.guide import Guide, GuideState
from loraplex_engine.core.request import Request
from loraplex_engine.ops.sampling.choose import choose_greedy, choose_tokens
from loraplex_engine.ops.sampling.row import NO_WORDS, SamplingRow
from loraplex_engine.sampling.counts import TokenCounts
from loraplex_engine.sampling.uniform import stream, uniform
from loraplex_engine.wire.messages import SamplingParams, TokenLogprobs

_GREEDY_BELOW = 1e-5
"""Temperatures under it are greedy: float32 could not tell the second choice from nothing."""
_MAX_WAIT_S = 0.002
"""How long a step waits for all its guides together; most of them are done before the model is."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What one step's rows got, by request id.

    `invalid` are those whose logits were not finite, `late` those whose guides were not done.
    """

    token_ids: dict[str, int] = field(default_factory=dict)
    invalid: frozenset[str] = frozenset()
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    late: frozenset[str] = frozenset()


class Sampler:
    """Chooses the next tokens of a step's requests."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._prepared: WeakKeyDictionary[Request, _Prepared] = WeakKeyDictionary()

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> Samples:
        """Choose one token per request.

        Args:
            logits: [Q, V] in any float type; not changed.
            requests: of each row; their output ends before the token that is wanted.
        """
        if not requests:
            return Samples()
        prepared = [self._prepare(request, logits.shape[1]) for request in requests]
        if all(p.is_plain for p in prepared):
            return _collect(requests, choose_greedy(logits).tolist())
        late = _find_late(requests)
        rows = [p.advance(request.output_ids) for p, request in zip(prepared, requests, strict=True)]
        chosen = choose_tokens(logits, rows)
        samples = _collect(requests, chosen.token_ids.tolist(), late)
        if any(row.num_top is not None for row in rows):
            logprobs, top_ids = chosen.logprobs.tolist(), chosen.top_ids.tolist()
            for index, (request, row) in enumerate(zip(requests, rows, strict=True)):
                if row.num_top is not None and request.request_id in samples.token_ids:
                    samples.logprobs[request.request_id] = _tell(logprobs[index], top_ids[index][: row.num_top])
        return samples

    def _prepare(self, request: Request, vocab_size: int) -> _Prepared:
        prepared = self._prepared.get(request)
        if prepared is None:
            prepared = self._prepared[request] = _Prepared(request, self._eos_token_ids, vocab_size)
        return prepared


class _Prepared:
    """One request as a row of the ops, kept from step to step."""

    def __init__(self, request: Request, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        params = request.params
        self._row = SamplingRow(
            temperature=params.temperature if params.temperature >= _GREEDY_BELOW else 0.0,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            num_top=params.logprobs,
        )
        self._guide = request.guide
        # a guide sees to it by itself: it knows whether anything else may come
        unwanted = () if request.guide is not None else (*eos_token_ids, *params.stop_token_ids)
        forbidden = [(token_id, -math.inf) for token_id in unwanted]
        self._bias = _edits(params.logit_bias, vocab_size)
        self._bias_before_min = _edits([*forbidden, *params.logit_bias], vocab_size)
        self._min_tokens = params.min_tokens
        self._stream = stream(params.seed, params.choice)
        self._counts = _start_counts(request)
        self.is_plain = (
            self._row.temperature == 0
            and request.guide is None
            and params.logprobs is None
            and params.min_tokens == 0
            and not params.logit_bias
            and self._counts is None
        )
        """Whether the likeliest token is all that it wants."""

    def advance(self, output_ids: Sequence[int]) -> SamplingRow:
        """The row for the token after `output_ids`."""
        row, position = self._row, len(output_ids)
        row.edit_ids, row.edit_values = self._bias_before_min if position < self._min_tokens else self._bias
        if self._counts is not None:
            row.seen_ids, row.seen_counts = self._counts.catch_up(output_ids)
        if self._guide is not None:
            is_ready = self._guide.state is GuideState.READY
            row.allowed = torch.from_numpy(self._guide.allowed.view(np.int32)) if is_ready else NO_WORDS
        row.number = uniform(self._stream, position)
        return row


def _edits(bias: Iterable[tuple[int, float]], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids and values; ids that the model does not have cannot be chosen anyway."""
    kept = [(token_id, value) for token_id, value in bias if 0 <= token_id < vocab_size]
    ids, values = [token_id for token_id, _ in kept], [value for _, value in kept]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)


def _start_counts(request: Request) -> TokenCounts | None:
    params = request.params
    if params.repetition_penalty != 1.0:
        return TokenCounts(request.prompt_ids, params.max_tokens)
    return TokenCounts((), params.max_tokens) if _counts_output(params) else None


def _counts_output(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _find_late(requests: Sequence[Request]) -> frozenset[str]:
    """Requests whose guides are not done; waits for them for a moment, all in all."""
    late: list[str] = []
    until = time.monotonic() + _MAX_WAIT_S
    for request in requests:
        guide = request.guide
        if guide is None or _is_ready(guide):
            continue
        guide.wait(max(0.0, until - time.monotonic()))
        if not _is_ready(guide):
            late.append(request.request_id)
    return frozenset(late)


def _is_ready(guide: Guide) -> bool:
    return guide.state is GuideState.READY


def _collect(requests: Sequence[Request], token_ids: Sequence[int], late: frozenset[str] = frozenset()) -> Samples:
    found = {request.request_id: token_id for request, token_id in zip(requests, token_ids, strict=True)}
    invalid = frozenset(request_id for request_id, token_id in found.items() if token_id < 0)
    sampled = {r: token_id for r, token_id in found.items() if token_id >= 0 and r not in late}
    return Samples(sampled, invalid, late=late - invalid)


def _tell(logprobs: Sequence[float], top_ids: Sequence[int]) -> TokenLogprobs:
    """`logprobs` of the token and of the likeliest; those that cannot happen are left out."""
    top = [(token_id, value) for token_id, value in zip(top_ids, logprobs[1:], strict=False) if value > -math.inf]
    return TokenLogprobs(logprobs[0], top)
