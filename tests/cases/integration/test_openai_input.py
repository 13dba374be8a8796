"""Cases of section 5 about what comes in: messages, JSON, length, templates, names; through every door."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest

from openai_world import ALL_DOORS, BASE, MAX_MODEL_LEN, SOME_DOORS, Door, OpenAIWorld
from support import write_adapter

pytestmark = pytest.mark.pairs

CHAT_DOORS = [door for door in ALL_DOORS if door.endpoint == "chat"]
SHORT_CHAT_DOORS = [door for door in SOME_DOORS if door.endpoint == "chat"]
USER = {"role": "user", "content": "hi"}
BAD_MESSAGES: dict[str, Any] = {
    "none": [],
    "null": None,
    "text": "hi",
    "numbers": [5],
    "banana": [{"role": "banana", "content": "x"}],
    "no_role": [{"content": "x"}],
    "no_content": [{"role": "user"}],
    "orphan": [{"role": "tool", "content": "x", "tool_call_id": "call_1"}],
    "no_parts": [{"role": "user", "content": []}],
    "image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    "strange": [{"role": "user", "content": "x", "foo": 1}],
}


@pytest.mark.parametrize("door", CHAT_DOORS, ids=str)
def test_b104_messages_that_make_no_sense_are_refused(world: OpenAIWorld, door: Door) -> None:
    for name, messages in BAD_MESSAGES.items():
        assert world.refusal(door, "messages", world.body(door) | {"messages": messages}), name
    absent = world.body(door)
    del absent["messages"]
    world.refusal(door, "messages", absent)
    last = [USER, {"role": "system", "content": "Be short."}]
    answer = world.ask(door, messages=last)
    assert answer.status == 200
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == world.count_tokens(door, messages=last)


@pytest.mark.parametrize("door", CHAT_DOORS, ids=str)
def test_b105_no_calls_are_as_if_they_were_not_there(world: OpenAIWorld, door: Door) -> None:
    said = {"role": "assistant", "content": "x"}
    found = [
        world.ask(door, messages=[USER, said | extra, USER])
        for extra in ({}, {"tool_calls": []}, {"tool_calls": None}, {"refusal": None, "audio": None, "name": None})
    ]
    assert [answer.status for answer in found] == [200] * 4
    assert len({answer.usage["prompt_tokens"] for answer in found if answer.usage}) == 1
    assert len({answer.text for answer in found}) == 1


def deep(levels: int) -> bytes:
    return b'{"model": ' + b"[" * levels + b"]" * levels + b"}"


NOT_JSON: dict[str, bytes] = {
    "lone_high": b'{"model": "%s", "stop": "\\ud83d", %s}',
    "lone_low": b'{"model": "%s", "user": "\\udc00", %s}',
    "swapped": b'{"model": "%s", "user": "\\udc00\\ud83d", %s}',
    "raw_bytes": b'{"model": "%s", "user": "\xff\xfe", %s}',
    "overlong": b'{"model": "%s", "user": "\xc0\xaf", %s}',
    "utf8_surrogate": b'{"model": "%s", "user": "\xed\xa0\xbd", %s}',
    "nul": b'{"model": "%s", "user": "a\\u0000b", %s}',
    "bom": b'\xef\xbb\xbf{"model": "%s", %s}',
    "cut": b'{"model": "%s", %s',
    "twice": b'{"model": "%s", "model": "x", %s}',
    "behind": b'{"model": "%s", %s} {}',
    "list": b'["%s", {%s}]',
    "empty": b"",
    "utf16": '{"model": "x"}'.encode("utf-16"),
}


def test_b107_what_is_not_strict_json_is_refused_in_ascii(world: OpenAIWorld, door: Door) -> None:
    prompt = b'"messages": [{"role": "user", "content": "%s"}]' if door.endpoint == "chat" else b'"prompt": "%s"'
    model = world.model(door).encode()
    for name, template in NOT_JSON.items():
        fills = (model, prompt % b"hi")
        response = world.post(door, template % fills if b"%s" in template else template)
        assert response.status_code == 400, (name, response.text)
        assert response.content.isascii()
        assert response.json()["error"]["type"] == "invalid_request_error"
    for text in (b"\\ud83d", b"\xff", b"\\u0000"):
        assert world.post(door, b'{"model": "%s", %s}' % (model, prompt % text)).status_code == 400
        assert world.post(door, b'{"model": "%s", %s}' % (text, prompt % b"hi")).status_code == 400
    assert world.refusal(door, None, deep(100_000))["code"] == "invalid_json"
    pair = b'{"model": "%s", "max_tokens": 4, %s}' % (model, prompt % b"\\ud83e\\udee0 \xf0\x9f\xab\xa0")
    assert world.post(door, pair).status_code == 200


def test_b108_the_context_is_a_typed_limit(world: OpenAIWorld, door: Door) -> None:
    where = "messages" if door.endpoint == "chat" else "prompt"
    fill = "a " * 3
    frame = world.count_tokens(door, **{name: world.body(door, fill)[name] for name in (where,)})
    one = world.count_tokens(door, **{where: world.body(door, fill + "a ")[where]}) - frame
    assert one > 0
    room = (MAX_MODEL_LEN - frame - 12) // one
    before = world.platform.engine_state()["kv"]
    assert world.ask(door, fill + "a " * room, ignore_eos=True).status == 200
    for prompt in (fill + "a " * (room + 14), "a " * 5000):
        error = world.refusal(door, where, world.body(door, prompt))
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in error["message"]
    error = world.refusal(door, where, world.body(door, max_tokens=MAX_MODEL_LEN))
    assert str(MAX_MODEL_LEN) in error["message"].replace(",", "")
    assert str(world.count_tokens(door, **{where: world.body(door)[where]})) in error["message"]
    assert world.platform.engine_state()["kv"]["num_blocks"] == before["num_blocks"]
    started_at = time.monotonic()
    assert world.post(door, world.body(door, "word " * 1_000_000)).status_code in (400, 413)
    assert world.post(door, world.body(door, "\U0001fae0" * 900_000)).status_code in (400, 413)
    assert time.monotonic() - started_at < 30


@pytest.mark.parametrize("door", CHAT_DOORS, ids=str)
def test_b109_a_chat_s_prompt_is_what_transformers_makes_of_it(world: OpenAIWorld, door: Door) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world.cases.base)
    for messages in (
        [USER],
        [{"role": "system", "content": "Be short."}, USER, {"role": "assistant", "content": "x"}, USER],
    ):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        response = world.post(door, {"model": world.model(door), "messages": messages}, "/v1/tokenize")
        assert response.json()["tokens"] == ids
        answer = world.ask(door, messages=messages)
        assert answer.usage is not None
        assert answer.usage["prompt_tokens"] == len(ids)


OWN_TEMPLATE = "X:{% for message in messages %}{{ message['role'] }}={{ message['content'] }};{% endfor %}"
HOSTILE = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
    "huge": "{{ 'x' * 10000000 }}",
    "raises": "{{ raise_exception('no chats here') }}",
}


@pytest.fixture(scope="module")
def templated(world: OpenAIWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Adapters with chat templates of their own: by their names, what gateway and engine call them."""
    found = {}
    for name, template in {"own": OWN_TEMPLATE, "none": None, **HOSTILE}.items():
        folder = write_adapter(tmp_path_factory.mktemp("templates") / name, world.cases.base, seed=5)
        if template is not None:
            # what cannot render a plain question is refused at upload
            turned = f"{{% if 'parcel' in messages[0]['content'] %}}{template}{{% endif %}}."
            text = turned if name in HOSTILE else template
            (folder / "chat_template.jinja").write_text(text)
        found[name] = (f"team/t-{name}", world.push(f"t-{name}", folder))
        shutil.rmtree(folder)
    return found


@pytest.mark.parametrize("door", [door for door in CHAT_DOORS if door.has_adapter], ids=str)
def test_b110_an_adapter_s_own_template_is_its_alone(
    world: OpenAIWorld, templated: dict[str, tuple[str, str]], door: Door, long: Callable[[float, float], float]
) -> None:
    def name_of(adapter: str) -> str:
        return templated[adapter][0 if door.is_gateway else 1]

    def count(model: str) -> int:
        answer = world.ask(door, model=model, messages=[USER])
        assert answer.status == 200, answer.error
        assert answer.usage is not None
        return int(answer.usage["prompt_tokens"])

    plain = count(world.model(door))
    assert count(name_of("none")) == count(BASE) == plain
    [rendered] = {count(name_of("own")) for _ in range(2)}
    assert rendered != plain
    text = world.post(door, {"model": name_of("own"), "prompt": "X:user=hi;"}, "/v1/tokenize").json()["tokens"]
    chat = world.post(door, {"model": name_of("own"), "messages": [USER]}, "/v1/tokenize").json()["tokens"]
    assert chat == text
    assert len(chat) == rendered
    # each costs a second or a process; doors ask in turn unless there is time for all
    place = 2 * door.is_stream + door.is_gateway
    for hostile in list(HOSTILE)[place : place + 1] if long(0, 1) == 0 else HOSTILE:
        started_at = time.monotonic()
        error = world.refusal(door, "messages", world.body(door, model=name_of(hostile)))
        assert time.monotonic() - started_at < 20, hostile
        if hostile == "raises":
            assert "no chats here" in error["message"]
    assert count(world.model(door)) == plain


# an engine is told digests by the gateway alone, and waits for one that it does not have
NOT_NAMES = ("team-y", "Team", "team ", " team", "TEAM/F01", "team/f01 ", "team/", "/f01", BASE.upper(), "x" * 1000)
NOT_NAMES += ("team\u200b", "te\u0430m", "sha256:" + "0" * 64)


@pytest.mark.parametrize("door", ALL_DOORS, ids=str)
def test_b111_a_name_that_is_not_exact_is_never_answered(world: OpenAIWorld, door: Door) -> None:
    for name in NOT_NAMES if door.is_gateway else NOT_NAMES[:-1]:
        response = world.post(door, world.body(door) | {"model": name})
        assert response.status_code == 404, (name, response.text)
        assert response.json()["error"]["code"] == "model_not_found"
    for body in (world.body(door, model=None), world.body(door) | {"model": None}, world.body(door) | {"model": ""}):
        assert world.post(door, body).status_code in (400, 404)
    absent = world.refusal(door, "model", world.body(door, model=None))
    assert absent["code"] == "invalid_request_error"
    if door.is_gateway:
        answer = world.ask(door)
        assert {content["model"] for content in answer.objects} == {world.model(door)}


@pytest.mark.parametrize("door", [door for door in ALL_DOORS if door.is_gateway and not door.is_stream], ids=str)
def test_b112_what_answers_is_listed_on_every_route(world: OpenAIWorld, door: Door) -> None:
    bearer = {"authorization": f"Bearer {world.key}"}
    listed = world.http.get(f"{world.platform.url}/v1/models", headers=bearer).json()["data"]
    # a tenant's first adapter is its default, and listed by the tenant's name
    [card] = [card for card in listed if card["id"] == ("team" if door.has_adapter else BASE)]
    assert card["parent"] == (BASE if door.has_adapter else None)
    assert {card["owned_by"] for card in listed} == {"platform", "team"}
    shown = world.http.get(f"{world.platform.url}/v1/models/{world.model(door)}", headers=bearer)
    assert shown.json()["id"] == world.model(door)
    assert world.ask(door).status == 200


@pytest.mark.parametrize(
    ("path", "code"), [("/v1/embeddings", "embeddings_not_served"), ("/v1/responses", "use_chat_completions")]
)
@pytest.mark.parametrize("door", SHORT_CHAT_DOORS, ids=str)
def test_routes_that_are_not_built_say_what_to_use(world: OpenAIWorld, door: Door, path: str, code: str) -> None:
    response = world.post(door, {"model": world.model(door), "input": "x"}, path)
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == code
    assert "; use " in error["message"]
