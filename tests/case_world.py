"""What the tests of the cases share: a tiny base, the good adapters that they name, and PEFT as the judge of both.

F01 is the control, F02 a second tenant's, F03 of a large rank, F04 rsLoRA, F06 with patterns, F07 on all seven
projections, F08 and F09 on one part of a fused group, F19 with a fraction for alpha, F20 of rank 1.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from engines import QV, SEVEN, EngineWorld, PeftJudge, assert_greedy_matches, text_ids
from loraplex_engine.core.request import Request
from loraplex_engine.wire.messages import TokenEvent

ADAPTERS: dict[str, dict[str, Any]] = {
    "F01": {"r": 8, "lora_alpha": 16, "target_modules": QV},
    "F02": {"r": 4, "lora_alpha": 4, "target_modules": QV},
    "F03": {"r": 64, "lora_alpha": 64, "target_modules": QV},
    "F04": {"r": 8, "lora_alpha": 16, "target_modules": QV, "use_rslora": True},
    "F06": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": QV,
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "^model.layers.1.self_attn.q_proj": 4},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 64},
    },
    "F07": {"r": 8, "lora_alpha": 16, "target_modules": SEVEN},
    "F08": {"r": 8, "lora_alpha": 16, "target_modules": ["k_proj"]},
    "F09": {"r": 8, "lora_alpha": 16, "target_modules": ["gate_proj"]},
    "F19": {"r": 8, "lora_alpha": 16.5, "target_modules": QV},
    "F20": {"r": 1, "lora_alpha": 32, "target_modules": QV},
}
_ATOL, _GAP = 1e-4, 1e-3
_counter = itertools.count()


class Cases:
    """A tiny base with its adapters; `world` starts engines on it, `judge` says what is right."""

    def __init__(self, base: Path, tmp: Path) -> None:
        self.base, self.tmp = base, tmp
        self.judge = PeftJudge(base, ADAPTERS, tmp / "peft", std=0.2)
        self.folders = self.judge.folders

    def world(self, **settings: Any) -> World:
        """An engine of its own, with an empty cache."""
        return World(self, self.tmp / f"cache-{next(_counter)}", **settings)


class World(EngineWorld):
    """An engine that knows the adapters by their names in the cases; None is the base."""

    def __init__(self, cases: Cases, cache: Path, **settings: Any) -> None:
        super().__init__(cases.base, cache, **{"cpu_threads": 1, **settings})
        self.cases = cases
        self.digest_of = {None: None, **{name: self.put(folder) for name, folder in cases.folders.items()}}
        self.name_of = {digest: name for name, digest in self.digest_of.items()}

    def ask(self, name: str | None, prompt: list[int], max_tokens: int = 8, **params: Any) -> Request:
        """A request that is not added yet."""
        return self.request(prompt, self.digest_of[name], max_tokens, **params)

    def answer(self, name: str | None, prompt: list[int], max_tokens: int = 8, **params: Any) -> list[int]:
        """Tokens of one request that has the engine for itself."""
        request = self.ask(name, prompt, max_tokens, **params)
        return text_ids(self.run([request])[request.request_id])

    def logits(self, *rows: tuple[str | None, list[int]]) -> list[torch.Tensor]:
        """Logits of every position, all rows in one batch."""
        return self.score([(ids, self.digest_of[name]) for name, ids in rows])

    def is_parity(self, name: str | None, ids: list[int], logits: torch.Tensor) -> bool:
        """Whether logits are PEFT's."""
        return bool((logits - self.cases.judge.logits(ids, name)).abs().max() <= _ATOL)

    def check_answer(self, request: Request, events: list[TokenEvent]) -> None:
        """Fail unless the request ended well and each of its tokens is the one that PEFT would choose."""
        assert events[-1].error is None, events[-1]
        ours, name = text_ids(events), self.name_of[request.digest]
        assert len(ours) == request.params.max_tokens
        reference = self.cases.judge.logits(request.prompt_ids + ours, name)
        assert_greedy_matches(ours, reference, len(request.prompt_ids), gap=_GAP)

    def check_idle(self) -> None:
        """Fail unless everything held was given back."""
        engine = self.engine
        engine.check_integrity()
        assert not engine.has_requests
        assert engine.pool.num_free == engine.pool.num_blocks
        assert [slot.num_pins for slot in engine.residency.slots.slots] == [0] * len(engine.residency.slots.slots)
