"""The forward pass that an adapter is held against: float32 in numpy, a matrix's rows at a time, no kernel of ours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.layout import FINAL_NORM, HEAD, layer_path
from loraplex_engine.parity.angles import build_angles
from loraplex_engine.parity.merged import MergedBase, Piece

Array = NDArray[np.float32]


class Reference:
    """Base and merged base over the same prompts: rows that the adapter acts on, and rows that it does not.

    Args:
        config: the base's facts.
        merged: its weights, with the adapter's.
        prompts: token ids of each sequence.
        starts: position in each sequence from which on the adapter acts; its length or more: nowhere.
    """

    def __init__(
        self, config: ModelConfig, merged: MergedBase, prompts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> None:
        self._config = config
        self._merged = merged
        lengths = [len(prompt) for prompt in prompts]
        ends = np.cumsum([0, *lengths])
        self._spans = [slice(int(begin), int(end)) for begin, end in itertools.pairwise(ends)]
        self._token_ids = np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts])
        positions = np.concatenate([np.arange(length) for length in lengths])
        is_adapted = positions >= np.repeat(np.asarray(starts), lengths)
        self._plain, self._adapted = np.flatnonzero(~is_adapted), np.flatnonzero(is_adapted)
        cosines, sines = build_angles(config.rope, config.head_dim, max(lengths))
        self._cosines, self._sines = cosines[positions][:, None, :], sines[positions][:, None, :]

    def compute_hidden(self) -> Array:
        """The normalised hidden states of all sequences, one after the other, [T, E]."""
        x, own = self._merged.read_embedded(self._token_ids)
        x[self._adapted] = own[self._adapted]
        for layer in range(self._config.num_layers):
            x += self._attend(layer, self._normalise(x, layer_path(layer, "input_layernorm")))
            x += self._feed_forward(layer, self._normalise(x, layer_path(layer, "post_attention_layernorm")))
        return self._normalise(x, FINAL_NORM)

    def compute_logits(self, hidden: Array) -> Iterator[tuple[slice, Array]]:
        """Yield the logits of all rows for some tokens of the vocabulary after the other, [T, n]."""
        for piece in self._merged.read_pieces(HEAD):
            yield piece.span, self._project_piece(hidden, piece)

    def _attend(self, layer: int, x: Array) -> Array:
        config = self._config
        q, k, v = (
            self._project(x, layer_path(layer, f"self_attn.{name}")).reshape(len(x), -1, config.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if config.has_qk_norm:
            q = self._normalise(q, layer_path(layer, "self_attn.q_norm"))
            k = self._normalise(k, layer_path(layer, "self_attn.k_norm"))
        q, k = self._rotate(q), self._rotate(k)
        group = config.num_heads // config.num_kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        attended = np.concatenate(
            [_attend_one(q[span], k[span], v[span], config.windows[layer]) for span in self._spans]
        )
        return self._project(attended.reshape(len(x), -1), layer_path(layer, "self_attn.o_proj"))

    def _feed_forward(self, layer: int, x: Array) -> Array:
        gate = self._project(x, layer_path(layer, "mlp.gate_proj"))
        with np.errstate(over="ignore"):
            gate /= 1 + np.exp(-gate)
        gate *= self._project(x, layer_path(layer, "mlp.up_proj"))
        return self._project(gate, layer_path(layer, "mlp.down_proj"))

    def _project(self, x: Array, path: str) -> Array:
        return np.concatenate([self._project_piece(x, piece) for piece in self._merged.read_pieces(path)], axis=1)

    def _project_piece(self, x: Array, piece: Piece) -> Array:
        if piece.own_rows is None:
            return _affine(x, piece.rows, piece.bias)
        y = np.empty((len(x), len(piece.rows)), np.float32)
        y[self._plain] = _affine(x[self._plain], piece.rows, piece.bias)
        y[self._adapted] = _affine(x[self._adapted], piece.own_rows, piece.own_bias)
        return y

    def _normalise(self, x: Array, path: str) -> Array:
        """RMS norm over the last axis; the gain of adapted rows may be their own."""
        gain, own = self._merged.read_norm(path)
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self._config.rms_norm_eps))
        y = x / scale
        y[self._plain] *= gain
        y[self._adapted] *= own
        return np.asarray(y, np.float32)

    def _rotate(self, x: Array) -> Array:
        """Turn each head's pairs (i, i + D / 2) by the angles of their position; x is [T, heads, D]."""
        half = x.shape[-1] // 2
        left, right = x[..., :half], x[..., half:]
        turned = (left * self._cosines - right * self._sines, right * self._cosines + left * self._sines)
        return np.concatenate(turned, axis=-1)


def _attend_one(q: Array, k: Array, v: Array, window: int | None) -> Array:
    """Causal attention of one sequence, [L, heads, D] each; `window` positions are seen, the own one included."""
    scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(math.sqrt(q.shape[-1]))
    rows, columns = np.ogrid[: len(q), : len(q)]
    is_hidden = columns > rows
    if window is not None:
        is_hidden |= columns <= rows - window
    scores = np.where(is_hidden, -np.inf, scores)
    weights: Any = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, v), np.float32)


def _affine(x: Array, rows: Array, bias: Array | None) -> Array:
    y: Array = x @ rows.T
    return y if bias is None else y + bias
