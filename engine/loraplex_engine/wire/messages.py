"""Messages between the engine's front (HTTP, tokenizer) and its core (scheduler, model): msgpack over two zmq sockets.

Times are seconds on the sender's monotonic clock unless a field says otherwise. Token counts are tokens of the base's
tokenizer. A message is one tagged struct; the decoders below accept nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token of one request is chosen.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` with `choice` and the output position decides the
    random number of each token, so company, preemption and restarts cannot change a sample.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logit of each token id named."""
    logprobs: int | None = None
    """Tell the log-probability of each token, and this many likeliest beside it; None: tell none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, the first excepted."""
    grammar: str | None = None
    """What the answer must match, as llguidance reads it; None: anything."""


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request or a call failed: a slug of `errors.py`, a sentence, and when to try again."""

    code: str
    message: str
    retry_after_s: int | None = None


class RequestStats(msgspec.Struct, frozen=True):
    """What one request cost: tokens, seconds in each stage, preemptions, bytes of its adapter put into a slot."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    load_s: float
    decode_s: float
    preemptions: int
    load_bytes: int = 0


# front -> core


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Start one generation. `digest` None is the base; `deadline_s` is seconds from now."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    digest: str | None = None
    tenant_id: str = ""
    deadline_s: float = 600.0
    priority: int = 0
    """Lower goes first, among the tenant's."""
    cache_salt: str = ""
    """Prefixes are shared among requests of one salt only."""
    weight: int = 1
    """The tenant's share of the engine over that of a tenant of weight 1."""


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """End one generation now; `reason` is `abort`, or `stop` when the front saw a stop string."""

    request_id: str
    reason: str = "abort"


class LoadAdapter(msgspec.Struct, frozen=True, tag="load"):
    """Make a digest resident; with `pin` it stays until dropped, None: pinned or not as it was.

    Answered when resident or failed. What is held against the digest is forgotten, unless `forgive` is False.
    """

    call_id: int
    digest: str
    pin: bool | None = None
    forgive: bool = True


class DropAdapter(msgspec.Struct, frozen=True, tag="drop"):
    """Drain a digest's requests, then free its slot. Answered when it is gone."""

    call_id: int
    digest: str


class GetState(msgspec.Struct, frozen=True, tag="state"):
    """Ask for slots, queue, KV and model facts."""

    call_id: int


class GetMetrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Ask for the core's metrics as Prometheus text."""

    call_id: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new requests; answered when none is left."""

    call_id: int


class MeasureParity(msgspec.Struct, frozen=True, tag="parity"):
    """Compare an adapter in its slot with the base and its merged deltas on `texts`, token ids of the golden texts.

    Answered with a `ParityResult` as a dict, or with the error that ended it.
    """

    call_id: int
    digest: str
    texts: list[list[int]]


class CancelParity(msgspec.Struct, frozen=True, tag="cancel_parity"):
    """Nobody waits for a `MeasureParity` any more; has no answer."""

    call_id: int


class BindFolder(msgspec.Struct, frozen=True, tag="test_bind"):
    """Test hook: make the PEFT folder at `path` loadable by its digest, although a check of its values fails."""

    call_id: int
    path: str


class PoisonFree(msgspec.Struct, frozen=True, tag="test_poison"):
    """Test hook: overwrite with NaN what nobody uses, free KV blocks and EMPTY slots."""

    call_id: int


class KillRequest(msgspec.Struct, frozen=True, tag="test_kill"):
    """Test hook: let a request fail once it has `after_tokens` tokens; `request_id` without a choice's number."""

    call_id: int
    request_id: str
    after_tokens: int


class SpoilSlot(msgspec.Struct, frozen=True, tag="test_spoil"):
    """Test hook: put other numbers where an adapter's lie in host memory and slot, as a fault in packing would."""

    call_id: int
    digest: str


HookCall = BindFolder | PoisonFree | KillRequest | SpoilSlot
ParityMessage = MeasureParity | CancelParity
ToCore = (
    AddRequest | AbortRequest | LoadAdapter | DropAdapter | GetState | GetMetrics | Drain | ParityMessage | HookCall
)

# core -> front


class CoreReady(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; these are its facts."""

    name: str
    fingerprint: str
    weights_digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_layers: int
    linears_per_layer: int
    dtype: str
    device: str
    row_invariant: bool
    max_loras: int
    max_lora_rank: int
    num_blocks: int
    block_size: int
    ops: str = ""
    """Form of the ops that serves: `native` or `torch`; `ops_reason` says why."""
    ops_reason: str = ""
    memory: dict[str, int] = {}
    """Where the core's memory went, bytes by use, and the tokens that the KV cache holds."""
    digest: str = ""
    """Of the model's files; empty if it is not known."""


class CoreProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A start-up stage, for people who wait."""

    stage: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The core's loop goes round. `patience_s` asks for a longer silence after it than usual: something compiles."""

    patience_s: float = 0.0


class CoreFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The core cannot start; the message says why and what to do."""

    message: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one output position, before temperature and filters."""

    logprob: float
    """Of the token that was chosen."""
    top: list[tuple[int, float]] = []
    """Token ids with theirs, likeliest first, the lower id first among equals."""


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """One `TokenLogprobs` for each of some tokens of a prompt, packed, and made when it is looked at.

    As objects those of 8,000 tokens, with twenty others each, would hold up all streams for half a second.
    """

    num_top: int = 0
    logprobs: bytes = b""
    """float32 [n, 1 + num_top]: of the token, then of the likeliest; minus infinity where there is none."""
    top_ids: bytes = b""
    """int32 [n, num_top]."""

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        width = 1 + self.num_top
        if (
            width < 1
            or len(self.logprobs) % (4 * width)
            or len(self.top_ids) * width != len(self.logprobs) * self.num_top
        ):
            raise ValueError("scores of a prompt do not fit together")

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.logprobs) // (4 * (1 + self.num_top))

    def __getitem__(self, index: int) -> TokenLogprobs:
        """Return what is said of one token; others that cannot happen are left out."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        num_top = self.num_top
        logprob, *values = struct.unpack_from(f"={1 + num_top}f", self.logprobs, index * 4 * (1 + num_top))
        ids = struct.unpack_from(f"={num_top}i", self.top_ids, index * 4 * num_top)
        return TokenLogprobs(logprob, [pair for pair in zip(ids, values, strict=True) if pair[1] > -math.inf])

    def __iter__(self) -> Iterator[TokenLogprobs]:
        """Go through all tokens."""
        return (self[index] for index in range(len(self)))


NO_SCORES = PromptScores()


def join_scores(parts: Sequence[PromptScores]) -> PromptScores:
    """Return what parts of one prompt say, as one."""
    if len(parts) < 2:
        return parts[0] if parts else NO_SCORES
    logprobs, top_ids = b"".join(part.logprobs for part in parts), b"".join(part.top_ids for part in parts)
    return PromptScores(parts[0].num_top, logprobs, top_ids)


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request; the last event of a request has `finish` and `stats`.

    `finish` is `stop`, `length`, `abort` or `error`. An EOS or stop token that ended the request is counted but not in
    `token_ids`.
    """

    request_id: str
    token_ids: list[int]
    finish: str | None = None
    error: ErrorInfo | None = None
    stats: RequestStats | None = None
    logprobs: list[TokenLogprobs] = []
    """One for each of `token_ids` where the request asked for them."""
    prompt_logprobs: PromptScores = NO_SCORES
    """One for each token of the prompt but the first, in the event of the first token or of the end before it."""


class TokenEvents(msgspec.Struct, frozen=True, tag="tokens"):
    """All events of one step."""

    events: list[TokenEvent]


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a call."""

    call_id: int
    body: dict[str, Any] | bytes | None = None
    error: ErrorInfo | None = None


ToFront = CoreReady | CoreProgress | Beat | CoreFailed | TokenEvents | Reply

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
