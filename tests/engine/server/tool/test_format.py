"""The form of calls follows from what a chat template writes, unless a flag says otherwise."""

from __future__ import annotations

import pytest

from loraplex_engine.config import EngineConfig, check_config
from loraplex_engine.errors import ConfigError
from loraplex_engine.server.tool.format import FORMATS, choose_format

QWEN = '{%- if tools %}# Tools ... <tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call>{% endif %}'
QWEN_CODER = "{%- if tools %}<tool_call>\\n<function=' + name + '>{% endif %}"
LLAMA31 = '{"name": function name, "parameters": dictionary}. {{ "Environment: ipython\\n" }}{{ tools }}'
MISTRAL = "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS] ["
MISTRAL_NAMED = "{{ tools }}[TOOL_CALLS]' + name + '[ARGS]"
GRANITE = "{{ tools }} respond only with <|tool_call|> followed by a JSON list"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        (LLAMA31, "llama3_json"),
        (MISTRAL, "mistral"),
        (MISTRAL_NAMED, "mistral_named"),
        (GRANITE, "granite"),
    ],
)
def test_the_template_shows_the_form(template: str, name: str) -> None:
    assert choose_format(template, knows_tools=True) == FORMATS[name]


def test_a_template_that_takes_one_call_in_a_turn_has_a_form_for_one() -> None:
    template = LLAMA31 + "{{- raise_exception('This model only supports single tool-calls at once!') }}"
    assert choose_format(template, knows_tools=True).is_single
    assert not choose_format(LLAMA31, knows_tools=True).is_single


@pytest.mark.parametrize("template", [None, "{{ messages }}", QWEN_CODER])
def test_a_form_that_is_not_known_is_replaced_by_our_own_words(template: str | None) -> None:
    form = choose_format(template, knows_tools=template is not None)
    assert (form.name, form.writes_prompt) == ("hermes", True)


def test_a_template_that_reads_no_tools_gets_our_words_although_it_shows_a_form() -> None:
    assert choose_format(MISTRAL, knows_tools=False).writes_prompt


def test_the_flag_wins_over_the_template() -> None:
    assert choose_format(QWEN, "llama3_json", knows_tools=True) == FORMATS["llama3_json"]
    form = choose_format("{{ messages }}", "mistral", knows_tools=False)
    assert (form.name, form.writes_prompt) == ("mistral", True)


def test_a_parser_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser is 'pythonic', but must be one of auto, hermes"):
        check_config(EngineConfig(base="", cache_dir="", tool_call_parser="pythonic"))
