"""Every adapter kind beside every other in one batch, against PEFT on the same base, in float32 on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engines import (
    INVOCATION,
    KINDS,
    SPECIAL_KINDS,
    EngineWorld,
    PeftJudge,
    SavedJudge,
    assert_greedy_matches,
    assert_logits_close,
    text_ids,
)
from loraplex_engine.bases.pull import pull

pytestmark = pytest.mark.endure
Row = tuple[list[int], str | None]
TINY = {"atol": 1e-4, "gap": 1e-3}
REAL = {"atol": 1e-3, "gap": 2e-3}
ALL_KINDS = (*KINDS, *SPECIAL_KINDS)
ENDS = ("r8_seven", "r64_seven", "alora", "everything")
KINDS_OF = {
    "tiny_llama": ALL_KINDS,
    "tiny_tied": (*ALL_KINDS[::2], *ENDS),
    "tiny_qwen2": (*ALL_KINDS[1::2], *ENDS),
    "smollm2_base": ("patterns", *ENDS[1:]),
}
"""The first has them all, two more have them between them; `make endure` tries all on each."""
_TEXT = """The mill stood at the bend of the river, and for eighty years its wheel had turned the grain of the valley
into flour. When the last miller died, his daughter came back from the city to sell it. She meant to stay for three
days. On the first evening she heard water in the walls, and on the second she found the letters that her mother had
never sent."""


class Setting:
    """A base, the judges' adapters on it, and rows that mix all kinds and the base."""

    def __init__(
        self,
        base: Path,
        tmp: Path,
        token_ids: Sequence[int],
        std: float,
        tolerance: dict[str, float],
        num_mixes: int,
        kinds: Collection[str] = (*KINDS, *SPECIAL_KINDS),
        **settings: int,
    ) -> None:
        self.base, self.tmp, self.settings = base, tmp, settings
        self.tolerance, self.num_mixes = tolerance, num_mixes
        plain = {name: kind for name, kind in KINDS.items() if name in kinds}
        self._special = {name: kind for name, kind in SPECIAL_KINDS.items() if name in kinds}
        self._plain = PeftJudge(base, plain, tmp / "peft", std=std)
        self._saved = SavedJudge(base, self._special, tmp / "saved", std=std)
        self.folders = {**self._plain.folders, **self._saved.folders}
        self.world, self.digest_of = self.build_world("float32")
        rng = random.Random(0)
        twice = [name for name in ("r8_seven", "r64_seven") if name in plain]
        names: list[str | None] = [None, *plain, *self._special, None, *twice]
        self.rows: list[Row] = [(_prompt(rng, token_ids), name) for name in names]
        self.references = self.judge([ids for ids, _ in self.rows])

    def build_world(self, dtype: str) -> tuple[EngineWorld, dict[str | None, str | None]]:
        """An engine in a dtype that has a slot for each kind, and the kinds' digests."""
        settings = {"max_loras": len(self.folders), "max_num_seqs": 32, **self.settings}
        world = EngineWorld(self.base, self.tmp / dtype, dtype=dtype, **settings)
        return world, {None: None, **{name: world.put(folder) for name, folder in self.folders.items()}}

    def judge(self, prompts: list[list[int]]) -> list[Tensor]:
        """PEFT's logits for one prompt of each of the rows."""
        names = [name for _, name in self.rows]
        logits = [torch.empty(0)] * len(names)
        for name in dict.fromkeys(names):
            indices = [index for index, other in enumerate(names) if other == name]
            for index, found in zip(indices, self.ask([prompts[i] for i in indices], name), strict=True):
                logits[index] = found
        return logits

    def ask(self, prompts: list[list[int]], name: str | None) -> list[Tensor]:
        """PEFT's logits of one adapter, or of the base."""
        if name in self._special:
            return self._saved.logits(prompts, name)
        return self._plain.logits_of(prompts, name)


def _prompt(rng: random.Random, token_ids: Sequence[int]) -> list[int]:
    """Parts of a text around tokens that the special kinds look for; the invocation stands there twice."""
    starts = [rng.randrange(len(token_ids) - 8) for _ in range(3)]
    parts = [list(token_ids[start : start + rng.randint(2, 8)]) for start in starts]
    return [*parts[0], *INVOCATION, *parts[1], 281, 28, *INVOCATION, 264, *parts[2]]


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_tied", "tiny_qwen2", "smollm2_base"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    tmp = tmp_path_factory.mktemp("parity")
    source: Path = request.getfixturevalue(request.param)
    is_full = request.config.getoption("--endure")
    kinds = ALL_KINDS if is_full else KINDS_OF[request.param]
    if request.param == "smollm2_base":
        # words that a language model knows: on others its attention is so sharp that float32 itself is off by 3e-3
        text = Tokenizer.from_file(str(source / "tokenizer.json")).encode(_TEXT).ids
        return Setting(source, tmp, text, 0.03, REAL, num_mixes=3 if is_full else 2, kinds=kinds)
    num_mixes = 50 if is_full else 8
    base = pull(str(source), tmp / "bases")
    return Setting(base, tmp, range(3, 300), 0.15, TINY, num_mixes=num_mixes, kinds=kinds, cpu_threads=1)


def test_every_row_of_a_mixed_batch_equals_peft(setting: Setting) -> None:
    ours = setting.world.score([(ids, setting.digest_of[name]) for ids, name in setting.rows])
    for logits, reference, (_, name) in zip(ours, setting.references, setting.rows, strict=True):
        assert_logits_close(logits, reference, name=name, **setting.tolerance)


def test_adapters_change_the_answer_far_beyond_the_tolerance(setting: Setting) -> None:
    bases = setting.ask([ids for ids, _ in setting.rows], None)
    for reference, base, (_, name) in zip(setting.references, bases, setting.rows, strict=True):
        if name is not None:
            assert (reference - base).abs().max() > 100 * setting.tolerance["atol"], name


def test_greedy_tokens_of_a_mixed_batch_equal_peft(setting: Setting, long: Callable[[float, float], float]) -> None:
    length = int(long(8, 32))
    requests = [setting.world.request(ids, setting.digest_of[name], length) for ids, name in setting.rows]
    events = setting.world.run(requests)
    ours = [text_ids(events[request.request_id]) for request in requests]
    references = setting.judge([ids + more for (ids, _), more in zip(setting.rows, ours, strict=True)])
    num_compared = 0
    for (ids, name), more, reference in zip(setting.rows, ours, references, strict=True):
        assert len(more) == length
        if name == "alora" and _invokes_again(more):
            continue
        num_compared += assert_greedy_matches(more, reference, len(ids), gap=setting.tolerance["gap"])
    assert num_compared >= 0.9 * length * (len(requests) - 1)


def test_a_row_has_the_same_bits_alone_and_in_random_mixes(setting: Setting) -> None:
    world = setting.world
    rows: list[Row] = [(ids, setting.digest_of[name]) for ids, name in setting.rows]
    alone = [world.score([row])[0] for row in rows]
    rng = random.Random(1)
    for _ in range(setting.num_mixes):
        chosen = rng.sample(range(len(rows)), rng.randint(2, min(16, len(rows))))
        for index, logits in zip(chosen, world.score([rows[index] for index in chosen]), strict=True):
            assert torch.equal(logits, alone[index]), setting.rows[index][1]


def test_bfloat16_chooses_as_peft_unless_nearly_tied(setting: Setting, long: Callable[[float, float], float]) -> None:
    if setting.tolerance is REAL and not long(0, 1):
        pytest.skip("takes minutes on a CPU without bfloat16; the tiny bases are held to the same")
    world, digest_of = setting.build_world("bfloat16")
    num_clear = 0
    scores = world.score([(ids, digest_of[name]) for ids, name in setting.rows])
    for logits, reference, (_, name) in zip(scores, setting.references, setting.rows, strict=True):
        top = reference.topk(2, dim=-1).values
        clear = top[:, 0] - top[:, 1] > 0.25
        # A language model's first position holds values of thousands: PEFT itself is off by 10 there in bfloat16.
        clear[0] = False
        num_clear += int(clear.sum())
        assert torch.equal(logits.argmax(-1)[clear], reference.argmax(-1)[clear]), name
    assert num_clear > 50


def _invokes_again(ids: list[int]) -> bool:
    """Whether an answer invokes the adapter once more: PEFT, asked about prompt and answer, would begin there."""
    num = len(INVOCATION)
    return any(ids[i : i + num] == INVOCATION for i in range(len(ids)))
