"""The fields that both generation routes have, those of completions alone, and ours; one row a line."""
# ruff: noqa: E501

from __future__ import annotations

from openai_examples import FORMAT, SCHEMA
from openai_table import BOTH, CHAT, COMPLETIONS, honoured, inert, part, refused

_ROUTES = "engine/server/test_routes.py::"
_LOGPROBS = "engine/server/test_logprobs.py::"
_CASES = "cases/integration/test_openai.py::"
_TOOLS = "cases/integration/test_openai_tools.py::"
_TEXT = "cases/integration/test_openai_text.py::"

# fmt: off
SAMPLING = (
    honoured("model", BOTH, "who answers: a base, a team's adapter, a version", "cases/integration/test_openai_input.py::test_b111_a_name_that_is_not_exact_is_never_answered", model="sha256:" + "ab" * 32),
    honoured("frequency_penalty", BOTH, "lowers the logit of a token for each time that the answer has it", _LOGPROBS + "test_penalties_and_biases_reach_the_core", frequency_penalty=0.5),
    honoured("presence_penalty", BOTH, "lowers the logits of tokens that the answer has", _LOGPROBS + "test_penalties_and_biases_reach_the_core", presence_penalty=0.5),
    honoured("logit_bias", BOTH, "added to the logits of these tokens", _CASES + "test_b101_a_bad_bias_is_refused_and_neighbours_go_on", logit_bias={"5": 10}),
    honoured("max_tokens", BOTH, "the longest answer; beyond the context it is refused, never cut", _CASES + "test_b086_max_tokens_is_a_positive_number", max_tokens=3),
    honoured("n", BOTH, "choices, each with random numbers of its own", _CASES + "test_b097_choices_of_a_seed_differ_and_repeat", n=2),
    honoured("seed", BOTH, "the same request gives the same answer", _CASES + "test_b098_a_seed_does_not_depend_on_neighbours", seed=8),
    honoured("stop", BOTH, "the text ends before the string that is complete first", _TEXT + "test_b087_b088_a_stop_string_ends_the_text_alike_everywhere", stop=["lo w"]),
    honoured("temperature", BOTH, "0 is greedy", _CASES + "test_b103_fields_out_of_range_are_refused_by_name", temperature=0.5),
    honoured("top_p", BOTH, "the likeliest tokens that have this share", _CASES + "test_b103_fields_out_of_range_are_refused_by_name", top_p=0.5),
    inert("user", BOTH, "who asks: kept for usage, chooses a canary's side; changes no answer", user="anna"),
    honoured("stream", BOTH, "events instead of one body", _ROUTES + "test_stream_and_whole_answer_agree", stream=True),
    part("stream=True", BOTH, "the value of the type for streams"),
    part("stream_options", BOTH, "only together with `stream`"),
    honoured("stream_options.include_usage", BOTH, "one more event with `usage` before the end", _CASES + "test_b093_usage_comes_only_when_asked_for", given={"stream": True}, stream_options={"include_usage": True}),
    refused("stream_options.include_obfuscation", BOTH, "false is taken; nothing is padded here", given={"stream": True}, stream_options={"include_obfuscation": True}),
)

COMPLETION_FIELDS = (
    honoured("prompt", COMPLETIONS, "text, token ids, or up to 16 of either; an empty one is refused", _ROUTES + "test_ids_may_be_a_prompt", prompt="bye"),
    refused("best_of", COMPLETIONS, "the number of `n` is taken: nothing is sampled and thrown away", best_of=2),
    honoured("echo", COMPLETIONS, "the prompt before the answer, with its log-probabilities", echo=True),
    honoured("logprobs", COMPLETIONS, "0 to 20 likeliest tokens at each position", _LOGPROBS + "test_a_completion_states_lists_of_one_length", logprobs=2),
    refused("suffix", COMPLETIONS, "an empty one is taken; no base here fills a middle", suffix="x"),
)

OURS = (
    honoured("top_k", BOTH, "the likeliest tokens; 0 and -1 are off", _CASES + "test_b102_a_top_k_beyond_the_vocabulary_is_all_of_it", top_k=5),
    honoured("min_p", BOTH, "tokens with this share of the likeliest one's", min_p=0.5),
    honoured("repetition_penalty", BOTH, "divides logits of what prompt or answer have", repetition_penalty=1.5),
    honoured("stop_token_ids", BOTH, "the answer ends at these tokens", stop_token_ids=[5]),
    honoured("min_tokens", BOTH, "no end before so many; refused above what the answer may have", min_tokens=3),
    honoured("ignore_eos", BOTH, "goes on behind the model's own end", ignore_eos=True),
    honoured("cache_salt", BOTH, "prefixes are shared among requests of one salt", "engine/unit/test_prefixes.py::test_prefixes_are_shared_within_a_salt_alone", cache_salt="s"),
    honoured("prompt_logprobs", BOTH, "log-probabilities of the prompt's tokens", prompt_logprobs=1),
    honoured("guided_json", BOTH, "the answer matches this schema", _TOOLS + "test_an_answer_matches_its_schema", guided_json=SCHEMA),
    honoured("guided_regex", BOTH, "the answer matches this expression", _TOOLS + "test_other_constraints_hold_as_well", guided_regex="[ab]{3}"),
    honoured("guided_choice", BOTH, "the answer is one of these", _TOOLS + "test_other_constraints_hold_as_well", guided_choice=["yes", "no"]),
    honoured("guided_grammar", BOTH, "the answer matches this Lark grammar", _TOOLS + "test_other_constraints_hold_as_well", guided_grammar='start: "yes" | "no"'),
    honoured("structured_outputs", BOTH, "one of `json`, `json_object`, `regex`, `choice`, `grammar`, as above", structured_outputs={"choice": ["yes", "no"]}),
    inert("safety_identifier", COMPLETIONS, "as for chats", safety_identifier="s"),
    inert("prompt_cache_key", COMPLETIONS, "as for chats", prompt_cache_key="k"),
    inert("metadata", COMPLETIONS, "as for chats", metadata={"team": "a"}),
    honoured("response_format", COMPLETIONS, "as for chats", response_format=FORMAT),
    honoured("add_generation_prompt", CHAT, "false: the prompt does not open the assistant's turn", add_generation_prompt=False),
    honoured("continue_final_message", CHAT, "the answer goes on from the last message", "engine/server/test_chat_templates.py::test_the_last_message_goes_on_as_in_transformers", given={"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}], "add_generation_prompt": False}, continue_final_message=True),
    honoured("chat_template_kwargs", CHAT, "variables that the template reads; others are refused", "engine/server/test_chat_templates.py::test_options_reach_the_template_and_others_are_refused", chat_template_kwargs={"mood": "good"}),
)
# fmt: on
