"""From a checked request and its prompt's ids to what the core is asked for, and the limits of that. Pure."""

from __future__ import annotations

import secrets

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.call import Caller
from loraplex_engine.server.echo import PartOptions
from loraplex_engine.server.generation import GenerationSpec
from loraplex_engine.wire.messages import SamplingParams
from loraplex_engine.wire.openai import MAX_GENERATIONS, SamplingFields

_SEED_MASK = 2**63 - 1
MAX_WHOLE_LOGPROBS = 1 << 20
"""Of an answer that is not streamed."""
MAX_PROMPT_LOGPROBS = 1 << 17
"""Of all prompts of a call: they are told at once, streamed or not."""


def build_params(
    request: SamplingFields,
    max_tokens: int,
    vocab_size: int,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str | None = None,
) -> SamplingParams:
    """Return how the tokens of a request are chosen and what is told of them."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        # the whole vocabulary is what 0 says, too
        top_k=request.top_k if 0 < request.top_k < vocab_size else 0,
        min_p=request.min_p,
        seed=secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=tuple(request.stop_token_ids),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=tuple(sorted((int(token_id), bias) for token_id, bias in request.logit_bias.items() if bias)),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def build_spec(
    request: SamplingFields,
    caller: Caller,
    prompts: list[list[int]],
    params: SamplingParams,
    digest: str | None,
    *,
    param: str,
) -> GenerationSpec:
    """Return all choices of a request, as yet without what they say of their prompts and of calls.

    Args:
        request: As checked.
        caller: Who asks.
        prompts: Ids of each.
        params: Of every choice.
        digest: The adapter's.
        param: The field that holds the prompts.
    """
    return GenerationSpec(
        request_id=caller.request_id,
        prompts=prompts,
        params=params,
        n=request.n,
        stops=request.stop if isinstance(request.stop, list) else [request.stop],
        digest=digest,
        tenant_id=caller.tenant_id,
        deadline_s=caller.left_s,
        priority=caller.priority,
        weight=caller.weight,
        prompt_param=param,
        # neither can hold the NUL
        cache_salt=f"{caller.cache_salt}\0{request.cache_salt}" if caller.cache_salt else request.cache_salt,
    )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Refuse an answer that would have to be longer than it may be, by what was asked or by what is left.

    Raises:
        InvalidRequestError: `param` is `min_tokens`.
    """
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"`min_tokens` must not be above {max_tokens}, which is how many tokens this answer may have; lower it, "
            "raise `max_tokens`, or shorten the prompt.",
            param="min_tokens",
        )


def check_generations(num_prompts: int, n: int) -> None:
    """Refuse more answers than a call may ask for.

    Raises:
        InvalidRequestError: `param` is `n`.
    """
    if num_prompts * n > MAX_GENERATIONS:
        raise InvalidRequestError(
            f"`n` is {n} for {num_prompts} prompts, but a call may ask for {MAX_GENERATIONS} answers in all.", param="n"
        )


def check_size(request: SamplingFields, spec: GenerationSpec, options: PartOptions) -> None:
    """Refuse an answer that would hold more log-probabilities at once than this process keeps for one client.

    Raises:
        InvalidRequestError: `param` names what to ask for less of.
    """
    if options.most is not None:
        num_positions = sum(map(len, spec.prompts))
        _check_count(
            num_positions,
            options.most,
            MAX_PROMPT_LOGPROBS,
            "prompt_logprobs" if options.echoed is None else "logprobs",
        )
    if not request.stream and spec.params.logprobs is not None:
        num_positions = len(spec.prompts) * spec.n * spec.params.max_tokens
        if options.echoed is not None:
            num_positions += spec.n * sum(map(len, spec.prompts))
        _check_count(num_positions, spec.params.logprobs, MAX_WHOLE_LOGPROBS, "logprobs")


def _check_count(num_positions: int, num_top: int, limit: int, param: str) -> None:
    if num_positions * (1 + num_top) > limit:
        where = "An answer of up to" if limit == MAX_WHOLE_LOGPROBS else "A prompt of"
        hint = "use `stream`, or ask" if limit == MAX_WHOLE_LOGPROBS else "ask"
        raise InvalidRequestError(
            f"{where} {num_positions} tokens with {1 + num_top} log-probabilities each is too large; {hint} for at "
            f"most {limit} in all.",
            param=param,
        )
