"""Special tokens that mark calls are text to the reader, and only those."""

from __future__ import annotations

import json

from loraplex_engine.server.detokenizer import Detokenizer
from loraplex_engine.server.tool.format import FORMATS
from loraplex_engine.server.tool.reader import CallReader
from loraplex_engine.token_table import build_token_table
from support_tools import marked_tokenizer, special_ids
from toy_tokenizers import sentencepiece


def test_a_call_behind_a_special_token_is_read() -> None:
    table = build_token_table(json.loads(marked_tokenizer().to_str()))
    assert {name: table.special_ids[name] for name in special_ids()} == special_ids()
    ids = marked_tokenizer().encode('<|im_start|>hi [TOOL_CALLS][{"name": "f", "arguments": {}}]<|im_end|>').ids
    for visible, expected in (({special_ids()["[TOOL_CALLS]"]}, ("hi", 1)), (set[int](), None)):
        detokenizer = Detokenizer(table, strips_leading_space=True, visible=visible)
        reader = CallReader(FORMATS["mistral"], ["f"])
        text = "".join(reader.push(detokenizer.push(token)).text for token in ids) + reader.flush().text
        assert (text, reader.num_calls) == (expected or ('hi [{"name": "f", "arguments": {}}]', 0))


def test_a_visible_token_begins_the_answer_so_that_the_next_space_is_text() -> None:
    table = build_token_table(json.loads(sentencepiece().to_str()))
    mark = table.special_ids["</s>"]
    ids = [mark, *sentencepiece().encode("a", add_special_tokens=False).ids]
    shown = Detokenizer(table, strips_leading_space=True, visible={mark})
    hidden = Detokenizer(table, strips_leading_space=True)
    assert "".join(map(shown.push, ids)) == "</s> a"
    assert "".join(map(hidden.push, ids)) == "a"
