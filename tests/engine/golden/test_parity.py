"""Every adapter kind beside every other in one batch, against PEFT on the same base, in float32 on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engines import KINDS, EngineWorld, PeftJudge, assert_greedy_matches, assert_logits_close, text_ids
from loraplex_engine.bases.pull import pull

Row = tuple[list[int], str | None]
TINY = {"atol": 1e-4, "gap": 1e-3}
REAL = {"atol": 1e-3, "gap": 2e-3}


class Setting:
    """A base, the judge's adapters on it, and twelve or more rows that mix all kinds and the base."""

    def __init__(self, base: Path, tmp: Path, std: float, tolerance: dict[str, float], **settings: int) -> None:
        self.base, self.tmp = base, tmp
        self.judge = PeftJudge(base, KINDS, tmp / "peft", std=std)
        self.world = EngineWorld(base, tmp / "cache", max_loras=len(KINDS), max_num_seqs=32, **settings)
        self.digest_of = {None: None, **{name: self.world.put(folder) for name, folder in self.judge.folders.items()}}
        self.tolerance = tolerance
        vocab = self.judge.model.config.vocab_size  # type: ignore[union-attr]
        rng = random.Random(0)
        names: list[str | None] = [None, *KINDS, None, "r8_seven", "r64_seven"]
        self.rows = [([rng.randrange(3, vocab) for _ in range(rng.randint(5, 30))], name) for name in names]


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_tied", "tiny_qwen2", "smollm2_base"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    tmp = tmp_path_factory.mktemp("parity")
    source: Path = request.getfixturevalue(request.param)
    if request.param == "smollm2_base":
        return Setting(source, tmp, 0.03, REAL)
    return Setting(pull(str(source), tmp / "bases"), tmp, 0.15, TINY, cpu_threads=1)


def test_every_row_of_a_mixed_batch_equals_peft(setting: Setting) -> None:
    ours = setting.world.score([(ids, setting.digest_of[name]) for ids, name in setting.rows])
    for logits, (ids, name) in zip(ours, setting.rows, strict=True):
        assert_logits_close(logits, setting.judge.logits(ids, name), **setting.tolerance)


def test_adapters_change_the_answer_far_beyond_the_tolerance(setting: Setting) -> None:
    ids = setting.rows[0][0]
    base = setting.judge.logits(ids, None)
    for name in KINDS:
        assert (setting.judge.logits(ids, name) - base).abs().max() > 100 * setting.tolerance["atol"], name


def test_greedy_tokens_of_a_mixed_batch_equal_peft(setting: Setting) -> None:
    requests = [setting.world.request(ids, setting.digest_of[name], 32) for ids, name in setting.rows]
    events = setting.world.run(requests)
    num_compared = 0
    for request, (ids, name) in zip(requests, setting.rows, strict=True):
        ours = text_ids(events[request.request_id])
        assert len(ours) == 32
        reference = setting.judge.logits(ids + ours, name)
        num_compared += assert_greedy_matches(ours, reference, len(ids), gap=setting.tolerance["gap"])
    assert num_compared >= 0.9 * 32 * len(requests)


def test_a_row_has_the_same_bits_alone_and_in_fifty_random_mixes(setting: Setting) -> None:
    world = setting.world
    rows: list[Row] = [(ids, setting.digest_of[name]) for ids, name in setting.rows]
    alone = [world.score([row])[0] for row in rows]
    rng = random.Random(1)
    for _ in range(50):
        chosen = rng.sample(range(len(rows)), rng.randint(2, len(rows)))
        for index, logits in zip(chosen, world.score([rows[index] for index in chosen]), strict=True):
            assert torch.equal(logits, alone[index]), setting.rows[index][1]


def test_bfloat16_chooses_as_peft_unless_nearly_tied(setting: Setting) -> None:
    world = EngineWorld(setting.base, setting.tmp / "bf16", dtype="bfloat16", max_loras=len(KINDS), max_num_seqs=32)
    digest_of = {None: None, **{name: world.put(folder) for name, folder in setting.judge.folders.items()}}
    num_clear = 0
    for logits, (ids, name) in zip(
        world.score([(ids, digest_of[name]) for ids, name in setting.rows]), setting.rows, strict=True
    ):
        reference = setting.judge.logits(ids, name)
        top = reference.topk(2, dim=-1).values
        clear = top[:, 0] - top[:, 1] > 0.25
        num_clear += int(clear.sum())
        assert torch.equal(logits.argmax(-1)[clear], reference.argmax(-1)[clear]), name
    assert num_clear > 50
