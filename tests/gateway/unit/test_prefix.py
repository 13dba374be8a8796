"""What begins alike has one key: turns of a conversation, prompts, a key of the client's own; never across tenants."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.gateway.prefix import find_prefix


def chat(*texts: Any) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "user"]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def find(fields: dict[str, Any], tenant_id: str | None = "t") -> str:
    return find_prefix(fields, tenant_id)


def test_the_turns_of_a_conversation_have_one_key() -> None:
    first = find(chat("be brief", "hello"))
    assert first == find(chat("be brief", "hello", "hi", "what is tea?"))
    assert first == find(chat("be brief", [{"type": "text", "text": "hello"}]))
    assert first != find(chat("be brief", "good day"))
    assert first != find(chat("be long", "hello"))


def test_a_long_beginning_is_enough() -> None:
    assert find(chat("x" * 5000, "a")) == find(chat("x" * 2000, "b"))
    assert find({"prompt": "x" * 5000 + "a"}) == find({"prompt": "x" * 5000 + "b"})
    assert find({"prompt": list(range(5000))}) == find({"prompt": list(range(4000))})
    assert find({"prompt": [1, 2]}) != find({"prompt": [1, 3]})
    assert find({"prompt": ["a", "b"]}) == find({"prompt": "a"})


def test_the_clients_own_key_comes_first() -> None:
    own = {"prompt_cache_key": "mine"}
    assert find(chat("a", "b") | own) == find({"prompt": "c"} | own) != find({"prompt": "c"})


def test_equal_words_of_others_have_another_key() -> None:
    fields = chat("a", "b")
    found = {find(fields, "t"), find(fields, "u"), find(fields, None), find(fields | {"cache_salt": "s"}, "t")}
    assert len(found) == 4
    assert find({"prompt": "b"}, "a") != find({"prompt": "ab"}, "")


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": ""}, {"prompt": []}, {"messages": []}, {"messages": "x"}, {"prompt": 7}]
)
def test_without_words_there_is_no_key(fields: dict[str, Any]) -> None:
    assert find(fields) == ""


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(values, values, values, values)
def test_any_body_has_a_key_or_none(prompt: Any, messages: Any, content: Any, salt: Any) -> None:
    for fields in ({"prompt": prompt}, {"messages": messages}, chat(content, content)):
        assert isinstance(find(fields | {"cache_salt": salt}), str)
