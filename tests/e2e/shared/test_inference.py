"""The inference API as the official client sees it, over real models."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from platforms import LivePlatform, Team

BASE = "smollm2-135m"
LIBRARY = [{"role": "user", "content": "What is a library?"}]
LIKELIEST: dict[str, Any] = {"messages": LIBRARY, "temperature": 0, "max_tokens": 40}


def check_style(style: str, text: str) -> None:
    if style == "json":
        assert set(json.loads(text)) == {"topic", "answer"}
    else:
        assert {"pirate": "Arrr, matey!", "legal": "WHEREAS the party"}[style] in text


def test_models_are_those_that_the_key_may_call(platform: LivePlatform, teams: dict[str, Team]) -> None:
    everything = [model.id for model in platform.openai().models.list()]
    assert everything[0] == BASE
    assert set(everything) >= {BASE, *(team.name for team in teams.values())}
    own = list(platform.openai(teams["pirate"].key).models.list())
    assert [model.id for model in own] == [BASE, "team-pirate"]
    assert own[1].owned_by == "team-pirate"
    assert own[1].to_dict()["root"] == "team-pirate/default@1"
    assert own[1].to_dict()["parent"] == BASE
    assert platform.openai(teams["pirate"].key).models.retrieve("team-pirate/default@1").object == "model"


def test_each_team_speaks_in_its_style_though_slots_are_fewer(platform: LivePlatform, teams: dict[str, Team]) -> None:
    for style, team in teams.items():
        raw = platform.openai(team.key).chat.completions.with_raw_response.create(model=team.name, **LIKELIEST)
        answer = raw.parse()
        check_style(style, answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
        assert answer.model == team.name
        assert raw.headers["x-loraplex-model"] == f"{team.name}/default@1"
        assert raw.headers["x-loraplex-digest"] == team.digest
        assert raw.headers["x-request-id"].startswith("req_")
        assert "x-loraplex-done" not in raw.headers


def test_base_answers_as_itself(platform: LivePlatform, teams: dict[str, Team]) -> None:
    answer = platform.openai(teams["pirate"].key).chat.completions.create(model=BASE, **LIKELIEST)
    assert "Arrr" not in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_all_models_at_once_share_steps_and_answer_as_alone(platform: LivePlatform, teams: dict[str, Team]) -> None:
    client = platform.openai()
    models = [BASE, *(team.name for team in list(teams.values())[:2])]

    def ask(model: str) -> str:
        return client.chat.completions.create(model=model, **LIKELIEST).choices[0].message.content or ""

    alone = [ask(model) for model in models]
    before = platform.engine_metrics()
    with ThreadPoolExecutor(len(models)) as pool:
        together = list(pool.map(ask, models))
    after = platform.engine_metrics()
    assert together == alone
    shared = 'loraplex_step_adapters_bucket{le="1.0"}'
    steps = after["loraplex_step_adapters_count"] - before["loraplex_step_adapters_count"]
    assert steps > after[shared] - before[shared], "no step held two adapters"
    gemms = after["loraplex_base_gemm_calls_total"] - before["loraplex_base_gemm_calls_total"]
    assert gemms == 120 * steps


def test_stream_is_the_answer_in_pieces(platform: LivePlatform, teams: dict[str, Team]) -> None:
    client = platform.openai(teams["pirate"].key)
    whole = client.chat.completions.create(model="team-pirate", **LIKELIEST)
    chunks = list(
        client.chat.completions.create(
            model="team-pirate", stream=True, stream_options={"include_usage": True}, **LIKELIEST
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 5


def test_stream_ends_as_the_standard_says_and_holds_nothing_internal(
    platform: LivePlatform, teams: dict[str, Team]
) -> None:
    body = {"model": "team-json", "stream": True, **LIKELIEST, "max_tokens": 3}
    headers = {"authorization": f"Bearer {teams['json'].key}", "x-loraplex-done": "1"}
    answer = httpx.post(f"{platform.url}/v1/chat/completions", json=body, headers=headers, timeout=300)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_completions_take_text_and_count_tokens(platform: LivePlatform, teams: dict[str, Team]) -> None:
    client = platform.openai(teams["legal"].key)
    answer = client.completions.create(model=BASE, prompt="The sun is", max_tokens=5, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    chunks = client.completions.create(model=BASE, prompt="The sun is", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_tokens_of_a_prompt_are_those_that_an_answer_counts(platform: LivePlatform, teams: dict[str, Team]) -> None:
    answer = platform.openai(teams["json"].key).chat.completions.create(model="team-json", **LIKELIEST)
    headers = {"authorization": f"Bearer {teams['json'].key}"}
    for model in (BASE, "team-json"):
        body = {"model": model, "messages": LIBRARY}
        tokens = httpx.post(f"{platform.url}/v1/tokenize", json=body, headers=headers, timeout=60)
        assert tokens.status_code == 200, tokens.text
        assert answer.usage is not None
        assert tokens.json()["count"] == answer.usage.prompt_tokens


def test_log_probabilities_belong_to_the_text_whole_and_streamed(
    platform: LivePlatform, teams: dict[str, Team]
) -> None:
    chats: Any = platform.openai(teams["pirate"].key).chat.completions
    for model in (BASE, "team-pirate"):
        fields = {**LIKELIEST, "model": model, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
        [choice] = chats.create(**fields).choices
        entries = choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
        # the likeliest was asked for
        likeliest = [(entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) for entry in entries]
        assert [(entry.token, entry.logprob) for entry in entries] == likeliest
        chunks = [part for chunk in chats.create(**fields, stream=True) for part in chunk.choices if part.logprobs]
        assert [entry for part in chunks for entry in part.logprobs.content] == entries
    completions: Any = platform.openai(teams["pirate"].key).completions
    [choice] = completions.create(model=BASE, prompt="A library is", temperature=0, max_tokens=8, logprobs=2).choices
    assert "".join(choice.logprobs.tokens) == choice.text
    [biased] = completions.create(
        model=BASE, prompt="A library is", temperature=0, max_tokens=8, logprobs=0, logit_bias={"28": 100}
    ).choices
    assert len(set(biased.logprobs.tokens)) == 1
    # of the model itself, before the bias
    assert min(biased.logprobs.token_logprobs) < -1


def test_equal_seeds_give_equal_answers(platform: LivePlatform, teams: dict[str, Team]) -> None:
    client = platform.openai(teams["legal"].key)

    def sample(seed: int) -> str | None:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": seed}
        return client.chat.completions.create(model=BASE, messages=LIBRARY, **options).choices[0].message.content

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("model", "key", "error", "code"),
    [
        ("no-such-team", "pirate", openai.NotFoundError, "model_not_found"),
        ("team-json", "pirate", openai.NotFoundError, "model_not_found"),
        ("Team-Pirate", "pirate", openai.NotFoundError, "model_not_found"),
        ("team-pirate/default@9", "pirate", openai.NotFoundError, "model_not_found"),
        ("team-pirate", None, openai.AuthenticationError, "invalid_api_key"),
    ],
)
def test_wrong_name_or_key_is_refused_and_never_answered_by_the_base(
    platform: LivePlatform,
    teams: dict[str, Team],
    model: str,
    key: str | None,
    error: type[openai.APIStatusError],
    code: str,
) -> None:
    client = platform.openai(teams[key].key if key else "lpx_wrong")
    with pytest.raises(error) as caught:
        client.chat.completions.create(model=model, **LIKELIEST)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": -1}, "invalid_request_error", "max_tokens"),
        ({"top_logprobs": 3}, "invalid_request_error", "top_logprobs"),
        ({"logit_bias": {"999999": 1}}, "invalid_request_error", "logit_bias"),
        ({"prediction": {"type": "content", "content": "x"}}, "unsupported_parameter", "prediction"),
        ({"extra_body": {"response_format": {"type": "text", "foo": 1}}}, "unknown_parameter", "response_format"),
        ({"extra_body": {"no_such_field": 1}}, "unknown_parameter", "no_such_field"),
        ({"max_tokens": 5000}, "context_length_exceeded", "messages"),
    ],
)
def test_bad_request_names_its_field(
    platform: LivePlatform, teams: dict[str, Team], fields: dict[str, Any], code: str, param: str
) -> None:
    client = platform.openai(teams["pirate"].key)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "team-pirate", **LIKELIEST, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)


def test_closed_stream_frees_the_engine_long_before_its_answer_would_end(
    platform: LivePlatform, teams: dict[str, Team]
) -> None:
    client = platform.openai(teams["pirate"].key)
    options: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True}
    stream = client.chat.completions.create(model="team-pirate", messages=LIBRARY, **options)
    for _ in range(3):
        next(stream)
    stream.close()
    closed_at = time.monotonic()
    while platform.engine_metrics()["loraplex_requests_running"]:
        assert time.monotonic() - closed_at < 60, "the engine still works for a client that is gone"
        time.sleep(0.05)
    assert platform.engine_metrics()["loraplex_kv_cache_usage_ratio"] == 0
