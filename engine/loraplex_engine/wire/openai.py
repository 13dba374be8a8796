"""The bodies of the OpenAI routes as types: what the engine accepts and answers, field by field.

A request field that is absent here is either refused or has neutral values that are accepted (`wire/field.py`).
Nulls are dropped before a body is converted, so an absent field and a null one are the same.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_CHOICES = 16
MAX_PROMPTS = 16
MAX_GENERATIONS = 128
"""Of one call: prompts times choices."""
MAX_STOPS = 16
MAX_STOP_CHARS = 128
MAX_METADATA = 16
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_CALLS = 128
"""Tool calls of one message in a conversation."""
MAX_SALT_CHARS = 256


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message's content."""

    text: str
    type: Literal["text"]


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool on offer."""

    function: FunctionSpec
    type: Literal["function"]


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """Names one function."""

    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The one tool that must be called."""

    function: FunctionName


class ToolReference(msgspec.Struct, forbid_unknown_fields=True):
    """One of the tools on offer."""

    function: FunctionName
    type: Literal["function"]


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[ToolReference]


class AllowedToolChoice(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools on offer."""

    allowed_tools: AllowedTools


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """What a call says: `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an assistant's message."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat; what goes with which role is checked in `server/field/message.py`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    """None only beside `tool_calls`."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """What an assistant called; never empty."""
    tool_call_id: str | None = None
    """The call that a tool answers."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema that an answer must match."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool = False


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the text of an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One constraint on the text of an answer; `guided_*` are the same as fields of the body."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields that both generation routes share; ranges are checked in `server/field/sampling.py`."""

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    cache_salt: str = ""
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """None is true."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions; a prompt is text or token ids, and a list of either is several prompts."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /v1/tokenize: `prompt` or `messages`, tokenised as the generation route of that field would."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    tools: list[Tool] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class TokenizeResponse(msgspec.Struct):
    """The ids of a prompt, and how many the model can take."""

    count: int
    max_model_len: int
    tokens: list[int]


class PromptTokensDetails(msgspec.Struct):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one request over all its choices; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens at a position: its text, and the bytes that it adds to the answer."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatMessage(msgspec.Struct):
    """The model's message; `content` is null if it is only calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: msgspec.Raw | None = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """What one chunk adds to a call: its first has the name."""

    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """One chunk's part of the call at `index`: its first has `id` and `type`."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What one chunk adds to a message."""

    role: str | None = None
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    """Null before it is known whether there will be text or only calls."""
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: msgspec.Raw | None = None


class CompletionChoice(msgspec.Struct):
    """One answer, or one chunk's part of it."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: msgspec.Raw | None = None
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct):
    """One entry of /v1/models; an engine lists only its base, since it knows adapters by digest, not by name."""

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    object: str = "model"


class ModelList(msgspec.Struct):
    """GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
