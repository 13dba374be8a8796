"""When a request is over: by its tokens, or by its time. Pure functions."""

from __future__ import annotations

from collections.abc import Container

from loraplex_engine.core.request import Request
from loraplex_engine.errors import DeadlineError, LoadTimeoutError, QueueFullError, RequestError
from loraplex_engine.scheduling.limits import Limits


def find_ending(
    request: Request, token_id: int, eos_token_ids: Container[int], max_model_len: int
) -> tuple[str | None, bool]:
    """Reason to end after this last token, and whether the token itself is withheld from the text."""
    params = request.params
    num_outputs = len(request.output_ids)
    is_free = num_outputs > params.min_tokens
    # a grammar that allows nothing but the end has the last word
    ends_at_eos = request.guide is not None or (is_free and not params.ignore_eos)
    if (ends_at_eos and token_id in eos_token_ids) or (is_free and token_id in params.stop_token_ids):
        return "stop", True
    if num_outputs >= params.max_tokens or request.num_tokens >= max_model_len:
        return "length", False
    return None, False


def find_expiry(request: Request, limits: Limits, now: float) -> RequestError | None:
    """Why the request's time is over: the deadline, the wait for a turn, the wait for an adapter; None if it is not."""
    is_queued = request.started_at is None
    if now >= request.deadline_at:
        return QueueFullError() if is_queued else DeadlineError()
    if not is_queued:
        return None
    if request.load_wait_at is not None:
        return LoadTimeoutError() if now - request.load_wait_at >= limits.adapter_load_timeout_s else None
    return QueueFullError() if now - request.arrived_at >= limits.queue_timeout_s else None
