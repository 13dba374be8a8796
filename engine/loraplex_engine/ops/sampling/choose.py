"""The next token of each row, greedy or drawn, with its log-probability."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from loraplex_engine.ops.dispatch import kernels_for
from loraplex_engine.ops.sampling.row import Chosen, SamplingRow


def choose_greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lower id among equals.

    Args:
        logits: [Q, V].

    Returns:
        int64 [Q]; -1 for a row that has NaN or infinity, or nothing above minus infinity.
    """
    return kernels_for(logits).choose_greedy(logits)


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Chosen:
    """One token per row; what a row gets depends on its own scores and settings alone.

    *Semantics*, in float32 up to the division by the temperature, the sums in float64:

    1. Log-probabilities are those of the scores as they came: natural, before every change below.
    2. Edits: `z[id] += value` (biases; forbidden tokens get minus infinity).
    3. Penalties on the seen tokens: `z = z / repetition if z > 0 else z * repetition`, then
       `z -= frequency * count`, then `z -= presence` where `count > 0`.
    4. Where only some tokens are allowed, the others get minus infinity.
    5. Greedy rows take the highest `z`, the lower id among equals, and end here.
    6. `mass = exp((z - max z) / temperature)`.
    7. Filters: `min_p` keeps what has at least that part of the likeliest token's mass; `top_k` of those, so many in
       falling order of `z`, the lower id first among equals; `top_p` of those, each before which less than that part
       of their mass lies. At least one token stays.
    8. The token is the first, in that order, where the cumulative mass passes `number` times the kept mass. Without
       `top_k` and `top_p` the order is that of the ids, which gives the same distribution without any sorting.

    Args:
        logits: [Q, V]; not changed.
        rows: settings of each row.

    Returns:
        Tokens and log-probabilities; a row whose scores are not finite has the token -1 and harms no other.
    """
    return kernels_for(logits).choose_tokens(logits, rows)
