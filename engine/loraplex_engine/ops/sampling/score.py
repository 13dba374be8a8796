"""The log-probability of a token that is given, for rows of a prompt."""

from __future__ import annotations

from torch import Tensor

from loraplex_engine.ops.dispatch import kernels_for
from loraplex_engine.ops.sampling.row import Scored


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> Scored:
    """How likely each row held the token that follows, and which ones it held likeliest.

    *Semantics*: `logprobs[:, 0] = log_softmax(logits)[token_ids]`, then the values of `top_ids`. A row's numbers are
    those that `choose_tokens` tells of the same scores and token.

    Args:
        logits: [Q, V]; not changed.
        token_ids: of each row, int64 [Q], within the vocabulary.
        num_top: log-probabilities to tell beside that of the token.

    Returns:
        The log-probabilities; a row whose scores are not finite has NaN for its token and harms no other.
    """
    return kernels_for(logits).score_tokens(logits, token_ids, num_top)
